"""Lines of results as the Batch API writes them."""

import msgspec

from trio_pool_serve.batches.batch_line import PREFIX, LineError
from trio_pool_serve.batches.line_run import FinishedLine


class _Error(msgspec.Struct):
    code: str
    message: str


class ResponseRecord(msgspec.Struct):
    """The response of a line, as it is written."""

    status_code: int
    request_id: str
    body: msgspec.Raw


class _Result(msgspec.Struct):
    id: str
    custom_id: str | None
    response: ResponseRecord | None
    error: _Error | None


def write_result(line: FinishedLine) -> tuple[bytes, bool]:
    """Return a line's result with the line end, and whether it belongs to the file of errors."""
    response = None
    if line.response is not None:
        # A line end in JSON is white space: within a string it is written as an escape.
        body = msgspec.Raw(line.response.body.replace(b"\n", b" "))
        response = ResponseRecord(line.response.status, line.request_id, body)
    error: LineError | None = line.error
    written = None if error is None else _Error(error.code, error.message)
    result = _Result(PREFIX + line.request_id, line.custom_id, response, written)
    return msgspec.json.encode(result) + b"\n", not line.is_completed
