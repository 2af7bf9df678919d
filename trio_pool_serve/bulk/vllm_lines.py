"""Lines of results as vLLM's ``run-batch`` writes them."""

import msgspec

from trio_pool_serve.runs.requests.line_format import ResponseRecord, body_in_line, encode_result
from trio_pool_serve.runs.requests.line_run import FinishedLine

NULL = msgspec.Raw(b"null")

REFUSED = 400

STREAMED = "Request must not be sent in stream mode"
"""What vLLM says of every response that is not JSON."""


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
        status, written = line.response.status, body_in_line(line.response)
        if line.is_completed:
            body = written
        else:
            error = written
    return encode_result(line, ResponseRecord(status, line.request_id, body), error), False
