"""Forwards requests to another process of the server, by HTTP over its Unix socket, streamed both ways."""

import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import trio
from hypercorn.app_wrappers import ASGIWrapper
from hypercorn.config import Config as HypercornConfig
from hypercorn.trio.tcp_server import TCPServer
from hypercorn.trio.worker_context import WorkerContext

from trio_pool_serve.api.http.request import FORWARDED, HttpRequest
from trio_pool_serve.api.http.response import HttpResponse
from trio_pool_serve.errors import PoolServeError, UnavailableError, unwrap_exception_groups
from trio_pool_serve.processes.large_imports import LazyModule

if TYPE_CHECKING:
    import httpx
else:
    httpx = LazyModule("httpx")  # 60 ms, most of them for its command line

NOT_FORWARDED = frozenset(
    {b"connection", b"keep-alive", b"te", b"trailer", b"transfer-encoding", b"upgrade", b"expect", b"x-request-id"}
)
"""Headers that belong to one connection, or are added again."""

KEPT_BYTES = 1024 * 1024
"""Maximum size of a response that is received before it is sent on."""

ASK_S, ANSWER_S = 1.0, 4.0
"""How often the other process is asked whether it still responds, and for how long. The kernel accepts connections for
a process that has been stopped."""

NO_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""A context for httpx, which would otherwise read all certificate authorities for each client."""


@asynccontextmanager
async def _forwarded_body(response: "httpx.Response", opened: AsyncExitStack) -> AsyncIterator[AsyncIterator[bytes]]:
    """Return the body of another process's response; ``opened`` is closed at its end."""
    async with opened:
        yield response.aiter_raw()


async def forward(request: HttpRequest, socket: Path, *, max_body_timeout_s: float) -> HttpResponse:
    """Return the response of the process that listens at ``socket``.

    Raises ``UnavailableError`` if that ends meanwhile, or does not respond. Cancellation: at once; the other process
    cancels the request.
    """
    content: Any = None
    if not request.is_bodiless_get:
        content = request.pieces or bytes(await request.body.take(max_body_timeout_s))
    headers = [(name, value) for name, value in request.scope["headers"] if name not in NOT_FORWARDED]
    headers.append((b"x-request-id", request.request_id.encode()))
    query = request.scope["query_string"]
    target = quote(request.path).encode() + (b"?" + query if query else b"")
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(
            httpx.AsyncClient(transport=httpx.AsyncHTTPTransport(uds=str(socket), verify=NO_TLS), timeout=None)
        )
        client.headers.clear()
        outgoing = client.build_request(
            request.scope["method"],
            httpx.URL(scheme="http", host="localhost", raw_path=target),
            headers=headers,
            content=content,
        )
        try:
            with unwrap_exception_groups(PoolServeError, httpx.TransportError):
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(_require_answers, client)
                    response = await client.send(outgoing, stream=True)
                    stack.push_async_callback(response.aclose)
                    nursery.cancel_scope.cancel(reason="the response has begun")
            return await _received(response, stack)
        except httpx.TransportError as error:
            raise UnavailableError(
                "The process that holds the files has ended or does not respond; try again."
            ) from error


async def _require_answers(client: "httpx.AsyncClient") -> None:
    """Raise ``httpx.TransportError`` once the other process does not respond. Cancellation: at once."""
    while True:
        await trio.sleep(ASK_S)
        await client.get("http://localhost/livez", timeout=ANSWER_S)


async def _received(response: "httpx.Response", stack: AsyncExitStack) -> HttpResponse:
    headers = [
        (name.decode(), value.decode("latin1"))
        for name, value in response.headers.raw
        if name.lower() not in NOT_FORWARDED | {b"date", b"server", b"content-length"}
    ]
    length = response.headers.get("content-length")
    if response.request.method != "HEAD" and length is not None and int(length) <= KEPT_BYTES:
        body = b"".join([piece async for piece in response.aiter_raw()])
        return HttpResponse(body, None, response.status_code, tuple(headers))
    if length is not None:
        headers.append(("content-length", length))
    return HttpResponse(_forwarded_body(response, stack.pop_all()), None, response.status_code, tuple(headers))


def serve_forwarded(app: Callable[[Any, Any, Any], Awaitable[None]]) -> Callable[[trio.SocketStream], Awaitable[None]]:
    """Return a function that serves the requests on a connection of another process with the ASGI ``app``."""
    settings = HypercornConfig()
    settings.include_server_header = False
    settings.errorlog = None

    async def marked(scope: Mapping[str, Any], receive: Any, send: Any) -> None:
        await app({**scope, "extensions": {**scope.get("extensions", {}), FORWARDED: {}}}, receive, send)

    async def serve(stream: trio.SocketStream) -> None:
        await TCPServer(ASGIWrapper(marked), settings, WorkerContext(None), {}, stream)  # type: ignore[arg-type]

    return serve
