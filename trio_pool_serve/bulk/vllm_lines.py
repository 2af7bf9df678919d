"""Lines of results as vLLM's ``run-batch`` writes them."""

import msgspec

from trio_pool_serve.runs.requests.line_results import FinishedLine, ResponseRecord, encode_result

NULL = msgspec.Raw(b"null")

REFUSED = 400

STREAMED = "Request must not be sent in stream mode"
"""What vLLM says of every response that is not JSON."""


def vllm_result(line: FinishedLine) -> bytes:
    """Return the result of a line, with the line end.

    The ``error`` is a response with an error, as its route writes it, or a sentence if the line is not a request.
    """
    status, body = REFUSED, NULL
    error: msgspec.Raw | str | None = None
    if line.response is None:
        assert line.error is not None  # noqa: S101  (a line has one of the two)
        error = line.error.message
    elif not line.response.is_json:
        error = STREAMED
    elif line.has_failed:
        status, error = line.response.status, line.response.body_in_line
    else:
        status, body = line.response.status, line.response.body_in_line
    return encode_result(line, ResponseRecord(status, line.request_id, body), error)
