"""Lines of results as vLLM's ``run-batch`` writes them."""

from typing import Any

import msgspec

from trio_pool_serve.batches.batch_line import PREFIX
from trio_pool_serve.batches.line_format import ResponseRecord
from trio_pool_serve.batches.line_run import FinishedLine

NULL = msgspec.Raw(b"null")

REFUSED = 400

STREAMED = "Request must not be sent in stream mode"
"""What vLLM says of every response that is not JSON."""


class _Output(msgspec.Struct):
    id: str
    custom_id: str | None
    response: ResponseRecord
    error: Any


def write_line(line: FinishedLine) -> tuple[bytes, bool]:
    """Return a line's result with the line end; it is never for another file.

    A response with an error is the ``error``, as its route writes it; a line that is no request has a sentence there.
    """
    status, body = REFUSED, NULL
    error: msgspec.Raw | str | None = None
    if line.response is None:
        assert line.error is not None  # noqa: S101  (a line has one of the two)
        error = line.error.message
    elif not line.response.is_json:
        error = STREAMED
    else:
        status = line.response.status
        # A line end in JSON is white space: within a string it is written as an escape.
        written = msgspec.Raw(line.response.body.replace(b"\n", b" "))
        if line.is_completed:
            body = written
        else:
            error = written
    output = _Output(PREFIX + line.request_id, line.custom_id, ResponseRecord(status, line.request_id, body), error)
    return msgspec.json.encode(output) + b"\n", False
