"""Lines of results: their form, and which error the Batch API writes in them."""

from typing import Any

import msgspec

from trio_pool_serve.runs.requests.batch_line import PREFIX
from trio_pool_serve.runs.requests.line_request import LineResponse
from trio_pool_serve.runs.requests.line_run import FinishedLine


class ResponseRecord(msgspec.Struct):
    """The response of a line, as it is written."""

    status_code: int
    request_id: str
    body: msgspec.Raw


class _Result(msgspec.Struct):
    id: str
    custom_id: str | None
    response: ResponseRecord | None
    error: Any


def body_in_line(response: LineResponse) -> msgspec.Raw:
    """Return a body as a part of a line: a line end in JSON is white space, as within a string it is an escape."""
    return msgspec.Raw(response.body.replace(b"\n", b" "))


def encode_result(line: FinishedLine, response: ResponseRecord | None, error: Any) -> bytes:
    """Return a line's result with the line end."""
    return msgspec.json.encode(_Result(PREFIX + line.request_id, line.custom_id, response, error)) + b"\n"


def write_result(line: FinishedLine) -> tuple[bytes, bool]:
    """Return a line's result as the Batch API has it, and whether it belongs to the file of errors."""
    response = error = None
    if line.response is not None:
        response = ResponseRecord(line.response.status, line.request_id, body_in_line(line.response))
    if line.error is not None:
        error = {"code": line.error.code, "message": line.error.message}
    return encode_result(line, response, error), not line.is_completed
