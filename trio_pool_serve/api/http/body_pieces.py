"""A request's body piece by piece, for handlers that do not keep it in memory."""

from collections.abc import Awaitable, Callable
from typing import Self

import trio
from attrs import define, field

from trio_pool_serve.errors import BodyTimeoutError

GATHERED_BYTES = 256 * 1024
"""Small pieces are put together until there is that much: each is handled in a thread, perhaps."""


@define(eq=False)
class BodyPieces:
    """Receives the next piece when it is asked for it: a client can send no faster than its body is handled.

    ``receive()`` returns a piece, and whether it is the last. Each may take ``timeout_s`` seconds.
    """

    receive: Callable[[], Awaitable[tuple[bytes, bool]]]
    timeout_s: float
    has_ended: bool = field(default=False, init=False)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes:
        """Return the next piece, of about ``GATHERED_BYTES``. Raises ``BodyTimeoutError``. Cancellation: at once."""
        gathered: list[bytes] = []
        nbytes = 0
        while not self.has_ended and nbytes < GATHERED_BYTES:
            piece = await self._next()
            gathered.append(piece)
            nbytes += len(piece)
        if not nbytes:
            raise StopAsyncIteration
        return b"".join(gathered)

    async def _next(self) -> bytes:
        try:
            with trio.fail_after(self.timeout_s):
                piece, self.has_ended = await self.receive()
        except trio.TooSlowError:
            raise BodyTimeoutError(f"Nothing of the body has arrived for {self.timeout_s:g} s.") from None
        return piece

    async def discard_rest(self, timeout_s: float, silence_s: float) -> None:
        """Receive what is left and throw it away, for as long as it keeps coming, and for ``timeout_s`` at most.

        Most clients send their whole body before they read a response. Cancellation: at once.
        """
        with trio.move_on_after(timeout_s):
            while not self.has_ended:
                with trio.move_on_after(silence_s) as silence:
                    _, self.has_ended = await self.receive()
                if silence.cancelled_caught:
                    return
