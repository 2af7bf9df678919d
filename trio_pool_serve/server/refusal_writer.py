"""Refusals as bytes: the overload gate is asked about a request, and its response is written without an exchange."""

import logging
from collections.abc import Callable

from attrs import frozen
from hypercorn.config import Config

from trio_pool_serve.api.http.overload import OverloadGate
from trio_pool_serve.server.incoming_request import (
    BadRequestError,
    IncomingRequest,
    LeftToHypercornError,
    RequestBuffer,
)
from trio_pool_serve.server.listening_socket import REFUSAL
from trio_pool_serve.server.outgoing_response import head_bytes, server_headers

logger = logging.getLogger(__name__)


@frozen(eq=False)
class Refusal:
    """The bytes of a response, and whether the connection is closed after it."""

    content: bytes
    closes: bool


CLIENT_LEFT = Refusal(b"", closes=True)
"""No response, for a client that no longer reads."""

UNREAD = Refusal(REFUSAL, closes=True)
"""The response to a request that is refused unread."""


@frozen(eq=False)
class RefusalWriter:
    """Asks the gate of an app about requests over HTTP/1.x."""

    gate: OverloadGate
    config: Config

    def refusal_of(
        self,
        request: IncomingRequest,
        body: bytes,
        client: tuple[str, int] | None,
        waited_s: float,
        is_last: Callable[[], bool],
    ) -> Refusal | None:
        """Return the refusal of a request; ``None`` if it must be handled, or has not arrived whole.

        If ``is_last()``, the server closes the connection after it.
        """
        if not self.gate.is_refusing(waited_s):
            return None
        return self._refusal_of(request, body, client, waited_s, is_last=is_last())

    def refusal_in(self, received: bytes, client: tuple[str, int] | None, waited_s: float) -> Refusal | None:
        """Return the refusal of a request; ``None`` unless ``received`` is one whole request that is refused."""
        if not self.gate.is_refusing(waited_s):
            return None
        buffer = RequestBuffer(self.config.h11_max_incomplete_size, received)
        try:
            request = buffer.take_head()
            body = b"" if request is None else buffer.take_body(request)
        except (BadRequestError, LeftToHypercornError):
            return None
        if request is None or buffer.unread:
            return None
        return self._refusal_of(request, body, client, waited_s, is_last=False)

    def _refusal_of(
        self, request: IncomingRequest, body: bytes, client: tuple[str, int] | None, waited_s: float, *, is_last: bool
    ) -> Refusal | None:
        if not request.is_complete:
            return None
        try:
            scope = request.scope(self.config.root_path, client, waited_s)
            if (refused := self.gate.answer_before_route(scope, body)) is None:
                return None
            status, headers, content = refused
            closes = request.closes or is_last
            headers += server_headers(self.config)
            if closes:
                headers.append((b"Connection", b"close"))
            return Refusal(head_bytes(status, headers) + content, closes)
        except Exception as error:
            # The request is handled like any other: then it can end only its own connection.
            logger.warning("an early refusal failed: %s", type(error).__name__)
            logger.debug("traceback of the early refusal", exc_info=error)
            return None
