"""Answers to requests whose body is still on its way."""

from typing import Any

import trio
from quart.wrappers import Request
from quart_trio.asgi import TrioASGIHTTPConnection

SILENCE_S = 1.0
"""A client that has sent nothing for this long is waiting for an answer, not sending a body."""


CLOSING_S = 5.0
"""Bound of the shield under which an answer is sent to a client that has not finished its body."""


class BodyDrainingConnection(TrioASGIHTTPConnection):
    """Lets a client finish sending before it is answered.

    Many answers are known before the body has arrived: 401, 404, 413. Most clients send their whole body
    before they look for an answer; if nobody reads it, both sides wait for each other. So the rest of
    the body is received and thrown away, for as long as it keeps coming and at most for quart's
    ``BODY_TIMEOUT``.
    """

    def __init__(self, app: Any, scope: Any) -> None:
        super().__init__(app, scope)
        self._body_ended = False
        self._arrived = trio.Event()

    async def handle_messages(self, nursery: trio.Nursery, request: Request, receive: Any) -> None:  # type: ignore[override]
        """Receive until the client is gone. Cancellation: at once."""

        async def noting() -> Any:
            message = await receive()
            self._body_ended = self._body_ended or not message.get("more_body", False)
            self._arrived.set()
            return message

        await super().handle_messages(nursery, request, noting)

    async def _send_response(self, send: Any, response: Any) -> None:
        with trio.move_on_after(self.app.config["BODY_TIMEOUT"]):
            await self._wait_for_body_end()
        if self._body_ended:
            await super()._send_response(send, response)
            return
        # hypercorn closes a connection whose body has not ended, inside this very call, and announces it to
        # ``handle_messages``, which cancels us: without the shield the closing would stop half way.
        with trio.move_on_after(CLOSING_S, shield=True):
            await super()._send_response(send, response)

    async def _wait_for_body_end(self) -> None:
        while not self._body_ended:
            self._arrived = trio.Event()
            with trio.move_on_after(SILENCE_S) as silence:
                await self._arrived.wait()
            if silence.cancelled_caught:
                return
