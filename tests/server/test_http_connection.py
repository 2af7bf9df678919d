"""Plain HTTP/1.x read by llhttp: the same answers, byte for byte, as hypercorn's with h11; where not, stricter ones."""

import contextlib
import logging
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from contextvars import ContextVar
from functools import partial

import pytest
import trio
from attrs import define, field
from hypercorn.config import Config
from hypercorn.trio.tcp_server import TCPServer
from hypercorn.utils import wrap_app
from trio.testing import wait_all_tasks_blocked

from tests.server.server_process import until
from tests.tables import each
from trio_pool_serve.api.http.connection import EXCHANGE
from trio_pool_serve.api.http.request import WAITED_S
from trio_pool_serve.server.contained_connection import serve_connection
from trio_pool_serve.server.http_connection import LAST_REQUEST_S
from trio_pool_serve.server.server_context import ServerContext

SEEN: ContextVar[str] = ContextVar("SEEN", default="nothing")


async def app(scope, receive, send) -> None:
    """What each path does with a response."""
    kind = scope["path"].strip("/")
    seen = SEEN.get()
    scope["state"]["scopes"].append({**scope, "state": None})
    SEEN.set("a request before")
    if kind == "raise":
        raise ValueError("before the response")
    if kind == "nothing":
        return
    body = b""
    while kind != "early":
        message = await receive()
        body += message.get("body", b"")
        if not message.get("more_body", False):
            break
    headers = {
        "stream": [],
        "empty": [],
        "unchanged": [],
        "closes": [(b"content-length", b"2"), (b"Connection", b"close")],
        "short": [(b"content-length", b"10")],
        "injected": [(b"content-length", b"2"), (b"x", b"a\r\nb: c")],
        "both": [(b"content-length", b"2"), (b"transfer-encoding", b"chunked"), (b"connection", b"keep-alive, x")],
        "context": [(b"x-seen", seen.encode()), (b"content-length", b"2")],
    }.get(kind, [(b"Content-Type", b"text/plain"), (b"content-length", b"%d" % len(body))])
    status = {"empty": 204, "unchanged": 304}.get(kind, 200)
    await send({"type": "http.response.start", "status": status, "headers": headers})
    if kind == "raise-late":
        raise ValueError("after the head")
    pieces = {"stream": [b"one", b"", b"three"], "echo": [body[:1], body[1:]], "early": [b""]}.get(kind, [b"ok"])
    for number, piece in enumerate(pieces, start=1):
        await send({"type": "http.response.body", "body": piece, "more_body": number < len(pieces)})


@define
class Listening:
    """Connections of one kind, with an app of its own."""

    port: int
    context: ServerContext
    state: dict = field(factory=dict)

    async def connect(self) -> trio.SocketStream:
        return await trio.open_tcp_stream("127.0.0.1", self.port)

    async def answer(self, *pieces: bytes) -> bytes:
        """Return all that is sent until the server closes the connection, without the date."""
        received = b""
        async with await self.connect() as stream:
            with contextlib.suppress(trio.BrokenResourceError), trio.fail_after(5):
                for piece in pieces:
                    await stream.send_all(piece)
                    await wait_all_tasks_blocked()
                while more := await stream.receive_some():
                    received += more
        return re.sub(rb"date: [^\r]*", b"date: -", received)


@asynccontextmanager
async def serving(connection, asgi=app, **settings) -> AsyncIterator[Listening]:
    config = Config()
    config.errorlog = logging.getLogger("hypercorn.error")
    for name, value in settings.items():
        setattr(config, name, value)
    context, state = ServerContext(), {"scopes": []}
    serve = partial(connection, wrap_app(asgi, 0, "asgi"), config, context, state)
    async with trio.open_nursery() as nursery:
        listeners = await nursery.start(partial(trio.serve_tcp, serve, 0, host="127.0.0.1"))
        yield Listening(listeners[0].socket.getsockname()[1], context, state)
        nursery.cancel_scope.cancel()


@pytest.fixture
async def ours() -> AsyncIterator[Listening]:
    async with serving(serve_connection) as listening:
        yield listening


@pytest.fixture
async def hypercorns() -> AsyncIterator[Listening]:
    async with serving(TCPServer) as listening:
        yield listening


def get(path: str, *headers: str, version: str = "1.1", method: str = "GET") -> bytes:
    return "\r\n".join([f"{method} {path} HTTP/{version}", "Host: x", *headers, "", ""]).encode()


def post(path: str, body: bytes, *headers: str) -> bytes:
    return get(path, f"Content-Length: {len(body)}", *headers, method="POST") + body


CLOSE = get("/echo", "Connection: close")
CHUNKED = get("/echo", "Transfer-Encoding: chunked", "Connection: close", method="POST")

SAME = {
    "closing": [CLOSE],
    "kept alive": [get("/echo"), CLOSE],
    "pipelined": [get("/echo") + post("/echo", b"abc") + get("/stream") + CLOSE],
    "behind a chunked body": [CHUNKED.replace(b"Connection: close\r\n", b"") + b"1\r\na\r\n0\r\n\r\n" + CLOSE],
    "HTTP/1.0": [get("/echo", version="1.0")],
    "HTTP/1.0 that asks to be kept": [get("/echo", "Connection: keep-alive", version="1.0")],
    "a stream": [get("/stream", "Connection: close")],
    "a stream for HTTP/1.0": [get("/stream", version="1.0")],
    "HEAD": [get("/echo", method="HEAD"), CLOSE],
    "HEAD of a stream": [get("/stream", method="HEAD"), get("/stream", method="HEAD", version="1.0")],
    "no content": [get("/empty") + get("/unchanged") + CLOSE],
    "the app closes": [get("/closes"), get("/echo")],
    "the app closes, too": [get("/closes", "Connection: close")],
    "two framings of the app's": [get("/both"), get("/both", "Connection: close")],
    "a body": [post("/echo", b"hello", "Connection: Close, x")],
    "a body in pieces": [post("/echo", b"", "Connection: close").replace(b": 0", b": 5"), b"he", b"llo"],
    "a chunked body": [CHUNKED + b"5\r\nhello\r\n1;a=b\r\n!\r\n0\r\nTrailer: x\r\n\r\n"],
    "a chunked body in pieces": [CHUNKED, b"3\r", b"\nabc\r", b"\n0", b"\r\n\r", b"\n"],
    "a chunk of line ends": [CHUNKED + b"6\r\n\r\n\r\n\r\n\r\n0\r\n\r\n"],
    "a chunk of many line ends": [CHUNKED + b"e00\r\n" + b"\r\n" * 1792 + b"\r\n0\r\n\r\n"],
    "100-continue": [post("/echo", b"", "Expect: 100-continue", "Connection: close").replace(b": 0", b": 2"), b"hi"],
    "an early answer": [get("/early", "Content-Length: 5", method="POST")],
    "an error before the response": [get("/raise")],
    "no response": [get("/nothing")],
    "a body that is too short": [get("/short")],
    "an injected header": [get("/injected")],
    "a head in pieces": [b"GET /echo HT", b"TP/1.1\r\nHost: x\r", b"\nConnection: close\r\n\r", b"\n"],
    "another method": [get("/echo", "Connection: close", method="BREW")],
    "CONNECT": [get("/echo", "Connection: close", method="CONNECT")],
    "h2c with a body": [post("/echo", b"a", "Connection: Upgrade, close", "Upgrade: h2c")],
    "an unknown upgrade": [post("/echo", b"a", "Connection: Upgrade, close", "Upgrade: foo")],
    "a target without a path": [get("?a", "Connection: close")],
    "nothing behind a wrong pipelined request": [get("/echo") + b"x\r\n\r\n" + CLOSE],
    "obviously no request": [b"\x16\x03\x01"],
    "an empty line": [b"\r\n" + CLOSE],
    "no host": [b"GET /echo HTTP/1.1\r\n\r\n"],
    "two hosts": [get("/echo", "Host: y")],
    "a space before a colon": [get("/echo", "A : b")],
    "a header without a name": [get("/echo", ": b")],
    "a NUL in a value": [get("/echo", "A: \0")],
    "a bare CR": [get("/echo", "A: b\rc: d")],
    "a target beyond ASCII": ["GET /\xff HTTP/1.1\r\nHost: x\r\n\r\n".encode("latin1")],
    "a query beyond ASCII": ["GET /?\xff HTTP/1.1\r\nHost: x\r\n\r\n".encode("latin1")],
    "a space in the target": [get("/a b")],
    "lengths that differ": [get("/echo", "Content-Length: 1", "Content-Length: 2")],
    "a negative length": [get("/echo", "Content-Length: -1")],
    "a signed length": [get("/echo", "Content-Length: +1")],
    "a huge length": [get("/echo", "Content-Length: " + "9" * 30)],
    "a length in hexadecimal": [get("/echo", "Content-Length: 0x1")],
    "no length": [get("/echo", "Content-Length:")],
    "gzip behind chunks": [get("/echo", "Transfer-Encoding: gzip, chunked")],
    "a chunk size in C's way": [CHUNKED + b"0x1\r\na\r\n0\r\n\r\n"],
    "a negative chunk": [CHUNKED + b"-1\r\na\r\n0\r\n\r\n"],
    "a chunk without its end": [CHUNKED + b"1\r\nabc0\r\n\r\n"],
    "a wrong trailer": [CHUNKED + b"1\r\na\r\n0\r\nA : b\r\n\r\n"],
    "a long head without end": [b"GET /echo HTTP/1.1\r\nA: " + b"a" * 70_000],
    "a NUL in the request line": [b"GET /\0 HTTP/1.1\r\nHost: x\r\n\r\n"],
}


@each("name", SAME)
async def test_answers_equal_hypercorn_s(name, ours, hypercorns):
    expected = await hypercorns.answer(*SAME[name])
    assert await ours.answer(*SAME[name]) == expected
    assert expected.startswith(b"HTTP/1.1 ")


async def test_an_error_behind_a_head_that_waits_for_its_body_ends_the_connection(ours, hypercorns):
    """hypercorn sends the head: a response that no client can read either."""
    request = post("/raise-late", b"ab")
    assert await ours.answer(request) == b""
    assert (await hypercorns.answer(request)).endswith(b"\r\n\r\n")


STRICTER = {
    "both framings": [get("/echo", "Content-Length: 5", "Transfer-Encoding: chunked") + b"0\r\n\r\n"],
    "the same length twice": [get("/echo", "Content-Length: 1", "Content-Length: 1") + b"a"],
    "a list of lengths": [get("/echo", "Content-Length: 1, 1") + b"a"],
    "a folded header": [get("/echo", "A: b\r\n c")],
    "line ends without CR": [b"GET /echo HTTP/1.1\nHost: x\n\n"],
    "one line end without CR": [get("/echo", "A: b\nC: d")],
    "a control character": [get("/echo", "A: \x01")],
    "a DEL": [get("/echo", "A: \x7f")],
    "a version that is not there": [get("/echo", version="9.9")],
    "a later version": [get("/echo", version="1.2")],
    "a long head at once": [get("/echo", "A: " + "a" * 20_000)],
    "a space behind a chunk's size": [CHUNKED + b"1 \r\na\r\n0\r\n\r\n"],
    "a length as trailer": [CHUNKED + b"1\r\na\r\n0\r\nContent-Length: 9\r\n\r\n"],
    "a line end in an extension": [CHUNKED + b"1;a\nb\r\na\r\n0\r\n\r\n"],
    "a long extension": [CHUNKED + b"1;a=" + b"b" * 17_000 + b"\r\na\r\n0\r\n\r\n"],
    "many extensions": [CHUNKED + (b"1;" + b"b" * 1000 + b"\r\na\r\n") * 20 + b"0\r\n\r\n"],
    "many trailers": [CHUNKED + b"1\r\na\r\n0\r\n" + b"A: b\r\n" * 4000 + b"\r\n"],
    "thousands of empty lines": [CHUNKED + b"4000\r\n" + b"\r\n" * 8192 + b"\r\n0\r\n\r\n"],
    "many zeros": [CHUNKED + b"0" * 17_000 + b"1\r\na\r\n0\r\n\r\n"],
    "two spaces after the method": [get("/echo").replace(b"GET ", b"GET  ")],
    "two spaces before the version": [get("/echo").replace(b" HTTP/", b"  HTTP/")],
    "a space after the version": [get("/echo").replace(b"HTTP/1.1", b"HTTP/1.1 ")],
    "a tab after the method": [get("/echo").replace(b"GET ", b"GET \t")],
    "chunks in HTTP/1.0": [CHUNKED.replace(b"HTTP/1.1", b"HTTP/1.0") + b"1\r\na\r\n0\r\n\r\n"],
    "HTTP/0.9": [b"GET /echo\r\n\r\n"],
    "half of the preface of HTTP/2": [b"PRI * HTTP/2.0\r\nHost: x\r\n\r\n"],
}


@each("name", STRICTER)
async def test_requests_that_two_parsers_may_read_differently_are_refused(name, ours):
    """h11 accepts nearly all of these; the request behind them must not be answered."""
    answer = await ours.answer(b"".join([*STRICTER[name], get("/echo", "X: smuggled")]))
    assert re.match(rb"HTTP/1.1 4(00|31) \r\ncontent-length: 0\r\n", answer), answer
    assert b"onnection: close\r\n" in answer
    assert answer.count(b"HTTP/1.1") == 1


@pytest.mark.parametrize("path", ["/echo?a=%20b&c", "/a%20b%2Fc?x?y", "http://x/echo", "*", "/%ff", "/echo?"])
async def test_the_scope_is_that_of_hypercorn(path, ours, hypercorns):
    request = post(path, b"abc", "X-Mixed: A  ", "accept:*/*", "A: 1", "a: 2", "Connection: close", "Empty:")
    for listening in (ours, hypercorns):
        await listening.answer(request)
    ports = {"client": ("127.0.0.1", 0), "server": ("127.0.0.1", 0)}
    mine, theirs = ({**one.state["scopes"][0], **ports} for one in (ours, hypercorns))
    assert mine.pop("extensions").keys() == {EXCHANGE, WAITED_S}
    assert theirs.pop("extensions") == {}
    assert mine == theirs
    assert [type(value) for value in mine.values()] == [type(value) for value in theirs.values()]


async def test_each_request_has_a_context_of_its_own(ours):
    answer = await ours.answer(get("/context") + get("/context", "Connection: close"))
    assert answer.count(b"x-seen: nothing") == 2


async def test_a_connection_is_closed_after_its_last_request_and_says_so():
    async with (
        serving(serve_connection, keep_alive_max_requests=2) as ours,
        serving(TCPServer, keep_alive_max_requests=2) as hypercorns,
    ):
        answer = await ours.answer(get("/echo") * 3)
        assert answer == await hypercorns.answer(get("/echo") * 3)
        assert answer.count(b"HTTP/1.1") == 2


async def test_an_idle_connection_is_closed_and_a_busy_one_is_not(autojump_clock):
    async def slow(scope, receive, send) -> None:
        await trio.sleep(100)
        await app({**scope, "path": "/echo"}, receive, send)

    async with serving(serve_connection, slow, keep_alive_timeout=10) as listening, await listening.connect() as stream:
        began = trio.current_time()
        await stream.send_all(get("/slow"))
        assert (await stream.receive_some()).startswith(b"HTTP/1.1 200")
        assert await stream.receive_some() == b""
        assert trio.current_time() - began == pytest.approx(110, abs=0.1)


async def test_a_shutdown_closes_idle_connections_and_busy_ones_behind_their_response():
    go_on = trio.Event()

    async def slow(scope, receive, send) -> None:
        await go_on.wait()
        await app({**scope, "path": "/echo"}, receive, send)

    async with (
        serving(serve_connection, slow) as listening,
        await listening.connect() as idle,
        await listening.connect() as busy,
    ):
        await busy.send_all(get("/slow") * 2)
        await wait_all_tasks_blocked()
        await listening.context.terminated.set()
        with trio.fail_after(5):
            assert await idle.receive_some() == b""
            go_on.set()
            received = b"".join([part async for part in busy])
        assert received.count(b"HTTP/1.1 200") == 1
        assert b"connection: close" in received


async def test_a_shutdown_waits_for_the_request_of_a_new_connection(autojump_clock):
    """Its client may have connected just before, and cannot tell a connection that is closed then from a crash."""
    async with (
        serving(serve_connection) as listening,
        await listening.connect() as asks,
        await listening.connect() as says_nothing,
    ):
        await wait_all_tasks_blocked()
        await listening.context.terminated.set()
        await wait_all_tasks_blocked()
        await asks.send_all(get("/echo"))
        received = b"".join([part async for part in asks])
        assert received.startswith(b"HTTP/1.1 200")
        assert b"connection: close" in received
        with trio.fail_after(LAST_REQUEST_S + 1):
            assert await says_nothing.receive_some() == b""


@pytest.mark.parametrize(
    ("head", "rest"),
    [
        (get("/", "Content-Length: 30000000", method="POST"), bytes(30_000_000)),
        (b"", get("/") * 1_000_000),
    ],
    ids=["a body", "pipelined requests"],
)
async def test_nothing_is_read_ahead_of_the_app(head, rest):
    """What has been read and not been received, and what the kernel keeps, is all that a client gets rid of."""

    async def never(scope, receive, send) -> None:
        await trio.sleep_forever()

    async with serving(serve_connection, never) as listening, await listening.connect() as stream:
        await stream.send_all(head)
        with trio.move_on_after(1) as waited:
            await stream.send_all(rest)
        assert waited.cancelled_caught


async def test_an_app_sees_the_disconnect(ours):
    left = trio.Event()

    async def waits(scope, receive, send) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        left.set()

    async with serving(serve_connection, waits) as listening:
        stream = await listening.connect()
        await stream.send_all(get("/"))
        await wait_all_tasks_blocked()
        await stream.aclose()
        with trio.fail_after(5):
            await left.wait()


async def test_connections_leave_no_task_behind(ours):
    await wait_all_tasks_blocked()
    before = trio.lowlevel.current_statistics().tasks_living
    for pieces in SAME.values():
        stream = await ours.connect()
        await stream.send_all(pieces[0])
        await stream.aclose()
    await until(lambda: trio.lowlevel.current_statistics().tasks_living <= before)
