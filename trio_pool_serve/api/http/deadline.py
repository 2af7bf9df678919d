"""When a request has to be answered: the server's limit, or the client's ``X-Request-Timeout`` if that is sooner."""

import math

import trio

from trio_pool_serve.api.http.request import HttpRequest
from trio_pool_serve.errors import InvalidRequestError


def set_deadline(request: HttpRequest, server_limit_s: float) -> float:
    """Set the deadline of a request, and return how many seconds it has in all.

    The server's limit is not for background work, which waits for as long as other clients' requests are computed.
    Raises ``InvalidRequestError`` for a header that is no number of seconds.
    """
    timeout_s = min(_client_limit_s(request), math.inf if request.client.is_background else server_limit_s)
    request.deadline = trio.current_time() - request.timings.waited_s + timeout_s
    return timeout_s


def _client_limit_s(request: HttpRequest) -> float:
    header = request.header(b"x-request-timeout")
    if header is None:
        return math.inf
    try:
        seconds = float(header)
    except ValueError:
        seconds = math.nan
    if not seconds > 0:
        raise InvalidRequestError(f"X-Request-Timeout must be a number of seconds above 0, not {header!r}.")
    return seconds
