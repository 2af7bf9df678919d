"""The deadline of a request: the server's limit or the client's, whichever is earlier."""

import math

import trio

from trio_pool_serve.api.http.request import HttpRequest
from trio_pool_serve.errors import require_request


def set_deadline(request: HttpRequest, server_limit_s: float) -> float:
    """Set the deadline of a request, and return how many seconds the request has in all.

    The limit is the server's, or the client's ``X-Request-Timeout`` if that is sooner. The server's is not for
    background work, which waits for as long as other clients' requests are computed. Raises
    ``InvalidRequestError`` for a header that is no number of seconds.
    """
    header = request.header(b"x-request-timeout")
    try:
        client_limit_s = math.inf if header is None else float(header)
    except ValueError:
        client_limit_s = math.nan
    require_request(client_limit_s > 0, f"X-Request-Timeout must be a number of seconds above 0, not {header!r}.")
    timeout_s = min(client_limit_s, math.inf if request.client.is_background else server_limit_s)
    request.deadline = trio.current_time() - request.timings.waited_s + timeout_s
    return timeout_s
