"""What every task route has in common: a deadline, timings, and refusing work while draining."""

import math

import trio

from trio_pool_serve.api.http.answer import Answer
from trio_pool_serve.api.http.exchange import Exchange, Handler
from trio_pool_serve.errors import DeadlineExceededError, InvalidRequestError
from trio_pool_serve.service import Service


def measured(service: Service, handler: Handler) -> Handler:
    """Wrap the handler of a task route.

    It runs under a deadline, the server's or the client's ``X-Request-Timeout`` (seconds) if that is
    sooner; past it ``DeadlineExceededError`` is raised.
    """

    async def run(exchange: Exchange) -> Answer:
        exchange.asks_for_task = True
        service.require_open()
        timeout_s = min(_client_timeout_s(exchange), service.config.time_limits.request_timeout_s)
        exchange.deadline = trio.current_time() + timeout_s
        try:
            with trio.fail_at(exchange.deadline):
                answer = await handler(exchange)
        except trio.TooSlowError:
            raise DeadlineExceededError(f"The deadline of {timeout_s:g} s has passed.") from None
        service.metrics.total.observe(exchange.timings.total_s)
        return answer

    return run


def _client_timeout_s(exchange: Exchange) -> float:
    header = exchange.header(b"x-request-timeout")
    if header is None:
        return math.inf
    try:
        seconds = float(header)
    except ValueError:
        seconds = math.nan
    if not seconds > 0:
        raise InvalidRequestError(f"X-Request-Timeout must be a number of seconds above 0, not {header!r}.")
    return seconds
