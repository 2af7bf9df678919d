"""Responses to the lines of batches: as the routes respond over HTTP, without a connection."""

from collections.abc import Sequence

import trio
from attrs import define, field

from trio_pool_serve.api.http.dispatch import PathByFields, TaskHandler, task_routes
from trio_pool_serve.api.http.endpoint import Dialect
from trio_pool_serve.api.http.error_responses import error_response
from trio_pool_serve.api.http.request import HttpRequest
from trio_pool_serve.api.http.response import HttpResponse
from trio_pool_serve.api.http.route_table import RouteTable
from trio_pool_serve.engine.placement import has_gpu
from trio_pool_serve.engine.planned_window import PlannedWindow, WindowMember
from trio_pool_serve.errors import (
    InvalidRequestError,
    NotFoundError,
    OverloadedError,
    UnavailableError,
    unwrap_exception_groups,
)
from trio_pool_serve.runs.requests.line_request import LineRequest, LineResponse, Submitter
from trio_pool_serve.service import Service

CPU_TOKEN_DIVISOR = 128
GPU_TOKEN_DIVISOR = 4
"""For lines beside requests over HTTP, which wait while a batch of lines is computed."""


PAUSE_S = 0.003
"""Before another line is begun while there are requests: a line takes about a millisecond of the event loop's time."""


@define(eq=False)
class LineResponder:
    """Responds to lines by the routes of the ``dialects``; errors that belong to none are written as ``default`` does.

    ``respond_all`` is a ``RespondAll``.
    """

    service: Service
    dialects: Sequence[Dialect]
    by_fields: PathByFields
    default: Dialect
    token_divisor: int = field()
    """Batches have the token budget of the engine divided by this."""
    _routes: RouteTable = field(init=False)

    @token_divisor.default
    def _of_the_device(self) -> int:
        return GPU_TOKEN_DIVISOR if has_gpu(self.service.config.loading) else CPU_TOKEN_DIVISOR

    def __attrs_post_init__(self) -> None:
        self._routes = RouteTable(task_routes(self.service, self.dialects, self.by_fields))

    @property
    def paths(self) -> list[str]:
        """The paths that lines may name."""
        return [path for method, path in self._routes.routes if method == "POST"]

    def has_route(self, path: str) -> bool:
        """Return whether lines may name a path."""
        return isinstance(self._routes.find("POST", self._routes.path_of_route(path)), TaskHandler)

    async def respond_all(self, lines: Sequence[LineRequest], submitter: Submitter) -> list[LineResponse]:
        """Return the responses to the lines of one window, in their order.

        Raises ``UnavailableError``. Cancellation: at once; nothing of the window stays in the queue.
        """
        responses: list[LineResponse | None] = [None] * len(lines)
        window = PlannedWindow(len(lines), self.token_divisor)

        async def respond(index: int, line: LineRequest) -> None:
            with window.members[index] as member:
                responses[index] = await self._respond(line, submitter, member)

        with unwrap_exception_groups(UnavailableError):
            async with trio.open_nursery() as nursery:
                for index, line in enumerate(lines):
                    nursery.start_soon(respond, index, line)
                    # All at once they would keep the event loop from other requests for a tenth of a second.
                    await trio.sleep(PAUSE_S if self.service.running_tasks else 0)
        return [response for response in responses if response is not None]

    async def _respond(self, line: LineRequest, submitter: Submitter, member: WindowMember) -> LineResponse:
        request = self._request_of(line, submitter)
        request.window = member
        handler = self._routes.find("POST", request.path)
        is_json = True
        try:
            if not isinstance(handler, TaskHandler):
                raise NotFoundError(f"There is no route {line.path} for lines of batches.")  # noqa: TRY301
            response = _json_of(await handler(request))
        except UnavailableError:
            raise
        except OverloadedError as error:  # other requests hold the memory: it is not the line's fault
            raise UnavailableError(str(error)) from error
        except Exception as error:
            is_json = not isinstance(error, _NotJsonError)
            response = error_response(error, request, _dialects_of(request, handler, self.default))
        finally:
            request.end()
        assert isinstance(response.body, bytes)  # noqa: S101  (errors are not streamed)
        return LineResponse(response.status, response.body, request.timings.tokens, is_json=is_json)

    def _request_of(self, line: LineRequest, submitter: Submitter) -> HttpRequest:
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(line.body)),
            (b"x-request-id", line.request_id.encode()),
        ]
        scope = {"type": "http", "method": "POST", "path": line.path, "headers": headers, "http_version": "1.1"}
        path = self._routes.path_of_route(line.path)
        request = HttpRequest(scope, path, self.service.config.network.max_body_bytes, created=line.created)
        request.client, request.models = submitter.client, submitter.models
        if submitter.usage is not None:
            request.timings.on_tokens = submitter.usage.take_tokens
        request.body.append(line.body)
        request.body.set_complete()
        return request


class _NotJsonError(InvalidRequestError):
    """The response to a request cannot be part of a line."""


def _json_of(response: HttpResponse) -> HttpResponse:
    """Return a response that can be part of a line. Raises ``_NotJsonError`` for others."""
    if not isinstance(response.body, bytes):
        raise _NotJsonError("The response to a line of a batch cannot be a stream.", param="stream")
    if response.content_type != "application/json":
        raise _NotJsonError(
            f"The response to a line of a batch must be JSON, not {response.content_type}.", param="encoding_format"
        )
    return response


def _dialects_of(request: HttpRequest, handler: object, default: Dialect) -> Sequence[Dialect]:
    if request.claimed_by is not None:
        return (request.claimed_by.dialect,)
    return [found.dialect for found in handler.candidates] if isinstance(handler, TaskHandler) else (default,)
