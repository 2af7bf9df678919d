"""A request's body as it arrives, gathered without copies or piece by piece."""

import mmap
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Self, TypeAlias

import trio
from attrs import define, field

from trio_pool_serve.errors import BodyTimeoutError, OverloadedError, PayloadTooLargeError, PoolServeError
from trio_pool_serve.rendering.memory_budget import Reservation, in_units

Buffer: TypeAlias = bytearray | mmap.mmap
"""A body in memory, which can be searched and decoded without a copy."""

MAPPED_BYTES = 4 * 2**20
"""Announced length above which a body is put in large pages: freeing a hundred megabytes of small pages takes five
milliseconds, with the interpreter lock held."""


SEARCHABLE_BYTES = 64 * 1024
"""Maximum length of a body that is searched for a word: that takes about 30 µs."""

SMALL_BYTES = 16 * 1024
"""Maximum announced length of a body that is not counted: the number of connections bounds their memory."""

RESERVED_AHEAD = 64 * 1024
"""Step in which memory is reserved as a body arrives, in bytes."""

LARGE_PAGE = 2 * 2**20
"""The step for mapped bodies: one byte takes a whole page."""

STALLED_S = 5.0
STALLED_BYTES = 16 * 1024
"""The least speed of a body, in bytes per ``STALLED_S``, while other requests are refused for lack of memory."""


class RequestBody:
    """A body gathered in one buffer, which is handed over instead of copied.

    ``expected_bytes`` is the announced length, ``None`` if there is none; past ``max_bytes`` nothing is kept.
    """

    def __init__(self, expected_bytes: int | None, max_bytes: int) -> None:
        self._max_bytes, self._setting = max_bytes, " (--max-body-bytes)"
        self.announced = expected_bytes or 0
        """The announced length in bytes; 0 without one."""
        self.is_small = expected_bytes is not None and expected_bytes <= SMALL_BYTES
        """Whether a body of at most ``SMALL_BYTES`` is announced."""
        self._complete = trio.Event()
        self._length = 0
        self._reservation: Reservation | None = None
        self._reserved = 0
        self._refusal: PoolServeError | None = None
        """The reason why nothing of the body is kept any longer; ``take`` raises it."""
        self.buffer: Buffer = bytearray()
        """The data that has arrived and is kept."""
        if self.announced > max_bytes:
            self._end()
        elif self.announced > MAPPED_BYTES:
            # Memory is taken as it is written to, not before.
            self.buffer = mmap.mmap(-1, self.announced, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            if hasattr(mmap, "MADV_HUGEPAGE"):
                self.buffer.madvise(mmap.MADV_HUGEPAGE)

    def lower_limit(self, max_bytes: int) -> None:
        """Lower the limit to ``max_bytes``, unless it is lower already."""
        if max_bytes < self._max_bytes:
            self._max_bytes, self._setting = max_bytes, ""
            if self.announced > max_bytes or self._length > max_bytes:
                self._end()

    def append(self, data: bytes) -> None:
        """Append a piece; past the limit nothing is kept, and ``take`` raises."""
        if not data or self._refusal is not None:
            return
        begin, self._length = self._length, self._length + len(data)
        if self._reservation is not None and self._length > self._reserved:
            self._reserve(self._reservation)
            if self._refusal is not None:
                return
        limit = len(self.buffer) if isinstance(self.buffer, mmap.mmap) else self._max_bytes
        if self._length > limit:
            self._end()
        elif isinstance(self.buffer, mmap.mmap):
            self.buffer[begin : self._length] = data
        else:
            self.buffer.extend(data)

    def hold(self, reservation: Reservation) -> None:
        """Count the body's memory as it arrives, unless it is small. If it does not fit, ``take`` raises."""
        if self._refusal is None and not self.is_small:
            self._reservation = reservation
            self._reserve(reservation)

    def _reserve(self, reservation: Reservation) -> None:
        if reservation.is_released:  # the request has ended: the rest is thrown away
            self._end()
            return
        step = LARGE_PAGE if isinstance(self.buffer, mmap.mmap) else RESERVED_AHEAD
        wanted = min((self._length // step + 1) * step, self.announced or self._max_bytes)
        try:
            reservation.grow(wanted - self._reserved)
        except OverloadedError as error:  # raised by ``take``
            self._end(error)
        else:
            self._reserved = wanted

    def _end(self, refusal: PoolServeError | None = None) -> None:
        """Keep nothing of the body any longer, because it is too large if no other reason is given."""
        too_large = PayloadTooLargeError(f"Body exceeds {in_units(self._max_bytes)}{self._setting}.")
        self.buffer, self._refusal = bytearray(), refusal or too_large
        self._complete.set()

    @contextmanager
    def _ended_if_stalled(self, reservation: Reservation) -> Iterator[None]:
        """In the block, end the body if it does not arrive and others need the memory."""
        since, length = time.monotonic(), self._length

        def end_if_stalled(now: float) -> None:
            nonlocal since, length
            if now < since + STALLED_S:
                return
            if self._length < length + STALLED_BYTES:
                reservation.settle(reservation.nbytes - self._reserved)
                self._end(BodyTimeoutError("The body stopped arriving, and other requests need the memory."))
            since, length = now, self._length

        reservation.budget.on_shortage.add(end_if_stalled)
        try:
            yield
        finally:
            reservation.budget.on_shortage.discard(end_if_stalled)

    @property
    def is_searchable(self) -> bool:
        """Whether all of a body has arrived that is not too large, and of at most ``SEARCHABLE_BYTES``."""
        return self._complete.is_set() and self._refusal is None and self._length <= SEARCHABLE_BYTES

    def set_complete(self) -> None:
        """Note that all of the body has arrived."""
        self._complete.set()

    async def take_small(self, max_bytes: int, timeout_s: float) -> bytes:
        """Wait for a whole body of at most ``max_bytes`` and return it. Raises and is cancelled as ``take``."""
        self.lower_limit(max_bytes)
        return bytes(await self.take(timeout_s))

    async def take(self, timeout_s: float) -> Buffer:
        """Wait for the whole body and return it; it is not kept here.

        Raises ``BodyTimeoutError``, ``OverloadedError``, and ``PayloadTooLargeError``, without waiting if too many
        bytes are announced. Cancellation: at once.
        """
        if not self._complete.is_set():  # a time limit takes 12 µs
            held = self._reservation
            unless_stalled = nullcontext() if held is None else self._ended_if_stalled(held)
            try:
                with trio.fail_after(timeout_s), unless_stalled:
                    await self._complete.wait()
            except trio.TooSlowError:
                raise BodyTimeoutError(
                    f"The body did not arrive within {timeout_s:g} s (--client-timeout-s)."
                ) from None
        if self._refusal is not None:
            raise self._refusal
        body, self.buffer = self.buffer, bytearray()
        return body


GATHERED_BYTES = 256 * 1024
"""Small pieces are joined up to this size, since each may be handled in a thread."""


@define(eq=False)
class BodyPieces:
    """Receives each piece when it is asked for: a client can send no faster than its body is handled.

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
            try:
                with trio.fail_after(self.timeout_s):
                    piece, self.has_ended = await self.receive()
            except trio.TooSlowError:
                raise BodyTimeoutError(
                    f"Nothing of the body has arrived for {self.timeout_s:g} s (--client-timeout-s)."
                ) from None
            gathered.append(piece)
            nbytes += len(piece)
        if not nbytes:
            raise StopAsyncIteration
        return b"".join(gathered)

    async def discard_rest(self, silence_s: float) -> None:
        """Receive the rest and throw it away, while it keeps coming and for at most ``timeout_s``.

        Most clients send their whole body before they read a response. Cancellation: at once.
        """
        with trio.move_on_after(self.timeout_s):
            while not self.has_ended:
                with trio.move_on_after(silence_s) as silence:
                    _, self.has_ended = await self.receive()
                if silence.cancelled_caught:
                    return
