"""What happens to every request before its handler has it, and after."""

from collections.abc import Mapping, Sequence

import trio

from trio_pool_serve.api.http.answer import Answer
from trio_pool_serve.api.http.auth import require_api_key
from trio_pool_serve.api.http.endpoint import Dialect
from trio_pool_serve.api.http.error_bodies import answer_error
from trio_pool_serve.api.http.exchange import Exchange, Handler
from trio_pool_serve.errors import innermost
from trio_pool_serve.service import Service


class Reception:
    """Lets requests in, and sees their answers out; errors are answered in somebody's dialect.

    That is the request's own if it is known, else those that ``by_path`` has for its path, else ``default``.
    """

    def __init__(self, service: Service, *, default: Dialect, by_path: Mapping[str, Sequence[Dialect]]) -> None:
        self._service = service
        self._default = default
        self._by_path = by_path

    async def answer(self, exchange: Exchange, handler: Handler) -> Answer:
        """Return the handler's answer, or that of the error that was raised.

        Cancellation: as the handler's. What else was raised beside it counts for more: the next checkpoint cancels.
        """
        try:
            self.admit(exchange)
            answer = await handler(exchange)
        except BaseExceptionGroup as group:
            _, rest = group.split(trio.Cancelled)
            cause = None if rest is None else innermost(rest)
            if not isinstance(cause, Exception):
                raise
            answer = self.refuse(exchange, cause)
        except Exception as error:
            answer = self.refuse(exchange, error)
        return answer.also_saying(self.last_words(exchange))

    def admit(self, exchange: Exchange) -> None:
        """Raise ``AuthenticationError`` if the request has no business here."""
        api_key = self._service.config.network.api_key
        if api_key is not None:
            require_api_key(exchange, api_key)

    def refuse(self, exchange: Exchange, error: Exception) -> Answer:
        """Count a request that fails, and return what its client is told."""
        self._service.metrics.failures.inc()
        known = exchange.dialect
        dialects = self._by_path.get(exchange.path, (self._default,)) if known is None else (known,)
        return answer_error(error, exchange.request_id, dialects)

    def last_words(self, exchange: Exchange) -> dict[str, str]:
        """Count an answer, and return the headers that it gets, whatever it is: its id, and where the time went."""
        headers = {"x-request-id": exchange.request_id}
        if exchange.asks_for_task:
            headers["server-timing"] = exchange.timings.server_timing()
            self._service.metrics.requests.inc()
        return headers
