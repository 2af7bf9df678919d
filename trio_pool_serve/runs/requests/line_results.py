"""The responses to lines of requests: how they are computed, and how they are written."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeAlias

import msgspec
from attrs import Factory, evolve, frozen

from trio_pool_serve.access.api_keys import KeyUsage
from trio_pool_serve.runs.requests.request_lines import BatchError, Line, request_id_of
from trio_pool_serve.runs.run import Computer, WindowResult
from trio_pool_serve.types import Client


@frozen
class Submitter:
    """The client of lines, the names of the models they may use (``None``: all), and the counter of their tokens."""

    client: Client = Factory(lambda: Client(is_background=True))
    models: frozenset[str] | None = None
    usage: KeyUsage | None = None


class LineRequest(msgspec.Struct, frozen=True):
    """A request to a route: its ``body`` is JSON.

    The response has this ``request_id`` and ``created`` (seconds since the epoch).
    """

    path: str
    body: bytes
    request_id: str
    created: int


class LineResponse(msgspec.Struct, frozen=True):
    """A response: its status, its JSON body, and the number of tokens computed for it.

    ``is_json`` is False if the response of the route is not JSON; then the body is an error about it.
    """

    status: int
    body: bytes
    tokens: int = 0
    is_json: bool = True

    @property
    def body_in_line(self) -> msgspec.Raw:
        """The body without line ends, which are white space in JSON: within a string they are escaped."""
        return msgspec.Raw(self.body.replace(b"\n", b" "))


RespondAll: TypeAlias = Callable[[Sequence[LineRequest], Submitter], Awaitable[list[LineResponse]]]
"""Returns the responses to the lines of one window, in their order.

The lines of a window are computed together, and with no others: the bytes of the responses depend only on the window
and the model. Raises ``UnavailableError`` if the server cannot compute now; all other
errors are responses. Cancellation: at once; nothing of the window stays in the queue.
"""

ENGINE_DIED = LineResponse(
    500, b'{"error":{"message":"The engine died while it computed this line.","type":"InternalServerError","code":500}}'
)


@frozen
class FinishedLine:
    """A line with its response, or with the error in its place."""

    custom_id: str | None
    request_id: str
    response: LineResponse | None = None
    error: BatchError | None = None

    @property
    def has_failed(self) -> bool:
        """Whether the line has no response with status 200."""
        return self.response is None or self.response.status != 200


@frozen(eq=False, kw_only=True)
class LineComputer(Computer[Line, FinishedLine]):
    """Computes lines by ``respond_all``.

    ``digest`` is the SHA-256 of the file, of which request ids are made; ``created`` is in the bodies of responses.
    ``error_of`` returns why a line is not to be computed.
    """

    respond_all: RespondAll
    submitter: Submitter
    digest: str
    created: int
    error_of: Callable[[Line], BatchError | None] = lambda _: None

    async def compute(self, rows: Sequence[Line]) -> WindowResult[FinishedLine]:
        """Compute lines. Raises ``UnavailableError``. Cancellation: at once."""
        finished = [self._finished(line, error=self.error_of(line)) for line in rows]
        requests = [
            LineRequest(line.url, line.body, each.request_id, self.created)
            for line, each in zip(rows, finished, strict=True)
            if each.error is None
        ]
        responses = iter(await self.respond_all(requests, self.submitter) if requests else ())
        finished = [each if each.error else evolve(each, response=next(responses)) for each in finished]
        return WindowResult(finished, sum(each.response.tokens for each in finished if each.response is not None))

    def refused(self, row: Line) -> FinishedLine:
        """Return a line with its error."""
        return self._finished(row, error=row.error)

    def died(self, row: Line) -> FinishedLine:
        """Return a line whose response is an error of the engine."""
        return self._finished(row, response=ENGINE_DIED)

    def _finished(self, line: Line, **result: Any) -> FinishedLine:
        return FinishedLine(line.custom_id, request_id_of(self.digest, line.number), **result)


def encode_result(line: FinishedLine, status: int | None, body: msgspec.Raw | None, error: Any) -> bytes:
    """Return the result of a line, with the line end; without a status, it has no response."""
    response = {"status_code": status, "request_id": line.request_id, "body": body}
    result = {
        "id": f"batch_req_{line.request_id}",
        "custom_id": line.custom_id,
        "response": None if status is None else response,
        "error": error,
    }
    return msgspec.json.encode(result) + b"\n"


def openai_result(line: FinishedLine) -> bytes:
    """Return the result of a line in the format of OpenAI's Batch API."""
    if line.response is not None:
        return encode_result(line, line.response.status, line.response.body_in_line, None)
    error = None if line.error is None else {"code": line.error.code, "message": line.error.message}
    return encode_result(line, None, None, error)


def openai_results(_: Sequence[Line], results: Sequence[FinishedLine]) -> tuple[list[bytes], list[bytes]]:
    """Return the results of lines for the output, and for the file of errors."""
    output, errors = (
        [openai_result(each) for each in results if each.has_failed == has_failed] for has_failed in (False, True)
    )
    return output, errors
