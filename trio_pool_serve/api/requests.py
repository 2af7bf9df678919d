"""What every task route has in common: an id, a deadline, timings, and refusing work while draining."""

import math
import uuid
from collections.abc import Awaitable, Callable
from functools import wraps

import trio
from quart import Quart, Response, g, request

from trio_pool_serve.errors import DeadlineExceededError, InvalidRequestError
from trio_pool_serve.service import Service
from trio_pool_serve.telemetry.timings import RequestTimings

MAX_REQUEST_ID = 128
"""Characters of a client's id that are echoed."""


def label_requests(app: Quart) -> None:
    """Give every request an id: the client's own, or a new one. A label only, never a key."""

    @app.before_request
    async def choose_id() -> None:
        given = request.headers.get("X-Request-Id", "")
        printable = given.isascii() and given.isprintable()
        g.request_id = given[:MAX_REQUEST_ID] if given and printable else uuid.uuid4().hex

    @app.after_request
    async def echo_id(response: Response) -> Response:
        if "request_id" in g:
            response.headers["X-Request-Id"] = g.request_id
        return response


def measured(
    service: Service,
) -> Callable[[Callable[[], Awaitable[Response]]], Callable[[], Awaitable[Response]]]:
    """Wrap the handler of a task route.

    It runs under a deadline, the server's or the client's ``X-Request-Timeout`` (seconds) if that is
    sooner; past it ``DeadlineExceededError`` is raised.
    """

    def wrap(handler: Callable[[], Awaitable[Response]]) -> Callable[[], Awaitable[Response]]:
        @wraps(handler)
        async def run() -> Response:
            g.timings = RequestTimings()
            service.require_open()
            timeout_s = min(_client_timeout_s(), service.config.time_limits.request_timeout_s)
            g.deadline = trio.current_time() + timeout_s
            try:
                with trio.fail_at(g.deadline):
                    response = await handler()
            except trio.TooSlowError:
                raise DeadlineExceededError(f"The deadline of {timeout_s:g} s has passed.") from None
            service.metrics.total.observe(g.timings.total_s)
            return response

        return run

    return wrap


def finish_requests(app: Quart, service: Service) -> None:
    """Count answers of task routes and errors of all, and say where the time went."""

    @app.after_request
    async def finish(response: Response) -> Response:
        if "timings" in g:
            response.headers["Server-Timing"] = g.timings.server_timing()
            service.metrics.requests.inc()
        if "failed" in g:
            service.metrics.failures.inc()
        return response


def _client_timeout_s() -> float:
    header = request.headers.get("X-Request-Timeout")
    if header is None:
        return math.inf
    try:
        seconds = float(header)
    except ValueError:
        seconds = math.nan
    if not seconds > 0:
        raise InvalidRequestError(f"X-Request-Timeout must be a number of seconds above 0, not {header!r}.")
    return seconds
