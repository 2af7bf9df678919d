"""A request's body as it arrives, without a copy of it."""

import mmap
from typing import TypeAlias

import trio
from quart_trio.wrappers.request import TrioBody, TrioRequest
from werkzeug.exceptions import RequestEntityTooLarge

from trio_pool_serve.errors import BodyTimeoutError, PayloadTooLargeError

Buffer: TypeAlias = bytearray | mmap.mmap
"""Both can be searched and decoded as they are."""

MAPPED_BYTES = 4 * 2**20
"""Bodies that announce more than this are put in large pages: giving a hundred megabytes of small ones back takes
five milliseconds, wherever that happens with the interpreter lock held."""


class ReceivedBody(TrioBody):
    """quart's body, gathered in one buffer that is handed over instead of copied."""

    def __init__(self, expected_content_length: int | None, max_content_length: int | None) -> None:
        super().__init__(expected_content_length, max_content_length)
        self._mapped: mmap.mmap | None = None
        self._length = 0
        if self._must_raise is None and (expected_content_length or 0) > MAPPED_BYTES:
            # Memory is taken as it is written to, not before.
            self._mapped = mmap.mmap(-1, expected_content_length or 0, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            if hasattr(mmap, "MADV_HUGEPAGE"):
                self._mapped.madvise(mmap.MADV_HUGEPAGE)

    def append(self, data: bytes) -> None:
        """Take what has arrived; past the limit nothing is kept, and whoever waits for the body gets a 413."""
        if not data or self._must_raise is not None:
            return
        begin, self._length = self._length, self._length + len(data)
        room = self._max_content_length if self._mapped is None else len(self._mapped)
        if room is not None and self._length > room:
            self._must_raise = RequestEntityTooLarge()
            self.clear()
            self.set_complete()
        elif self._mapped is not None:
            self._mapped[begin : self._length] = data
        else:
            self._data.extend(data)

    def clear(self) -> None:
        """Let go of what has arrived."""
        self._data, self._mapped = bytearray(), None

    async def take(self, timeout_s: float) -> Buffer:
        """Wait for the whole body and return it; nobody else has it then.

        Raises ``BodyTimeoutError``, and ``PayloadTooLargeError`` before a byte has arrived if too many are announced.
        Cancellation: at once.
        """
        if self._must_raise is None:
            try:
                with trio.fail_after(timeout_s):
                    await self._complete.wait()
            except trio.TooSlowError:
                raise BodyTimeoutError(f"The body did not arrive within {timeout_s:g} s.") from None
        if self._must_raise is not None:
            raise PayloadTooLargeError(f"The body may have {self._max_content_length} bytes, and has more.")
        body: Buffer = self._data if self._mapped is None else self._mapped
        self.clear()
        return body


class BufferedRequest(TrioRequest):
    """Quart's request, with such a body."""

    body_class = ReceivedBody
