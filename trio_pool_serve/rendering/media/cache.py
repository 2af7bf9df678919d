"""Prepared images, kept for those who ask again."""

from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import TypeAlias

import trio
from attrs import define, field, frozen

from trio_pool_serve.errors import UnavailableError
from trio_pool_serve.types import ImageFeatures

Key: TypeAlias = tuple[str, bytes]
"""The key of an image processor, and the SHA-256 of what it was given."""

Prepare: TypeAlias = Callable[[], Awaitable[ImageFeatures]]


@frozen
class CacheStatistics:
    """What a cache holds and has done. A hit is an image that was not prepared for who asked: kept, or under way."""

    entries: int
    bytes: int
    hits: int
    misses: int
    in_flight: int


@define(eq=False)
class _Flight:
    """An image that is being prepared, for as long as anybody waits for it."""

    key: Key
    prepare: Prepare
    scope: trio.CancelScope = field(factory=trio.CancelScope, init=False)
    done: trio.Event = field(factory=trio.Event, init=False)
    waiting: int = field(default=0, init=False)
    is_kept: bool = field(default=True, init=False)
    features: ImageFeatures | None = field(default=None, init=False)
    error: Exception = field(factory=lambda: UnavailableError("The server is shutting down."), init=False)


@define(eq=False)
class MediaCache:
    """Keeps what was asked for last, in at most ``max_bytes`` bytes; prepares an image once however many ask for it.

    With 0 bytes nothing is kept, but an image that is under way is still shared. What it gives is everybody's, and not
    to be changed.
    """

    max_bytes: int
    _kept: OrderedDict[Key, ImageFeatures] = field(init=False, factory=OrderedDict)
    _bytes: int = field(init=False, default=0)
    _flights: dict[Key, _Flight] = field(init=False, factory=dict)
    """Those that can be joined: not those that are cancelled, or older than the last ``clear``."""
    _in_flight: int = field(init=False, default=0)
    _hits: int = field(init=False, default=0)
    _misses: int = field(init=False, default=0)
    _nursery: trio.Nursery | None = field(init=False, default=None)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Prepare images until cancelled.

        Cancellation: at once; who waits for an image is told that the server shuts down.
        """
        try:
            async with trio.open_nursery() as self._nursery:
                task_status.started()
                await trio.sleep_forever()
        finally:
            self._nursery = None

    async def get(self, key: Key, prepare: Prepare) -> ImageFeatures:
        """Return what is kept by a key, or what ``prepare()`` returns, which is not called while another's runs.

        Raises what ``prepare()`` raises, which is not kept; ``UnavailableError`` unless ``run`` runs.

        Cancellation: at once; ``prepare()`` is cancelled with the last who waits for it.
        """
        await trio.lowlevel.checkpoint()
        features = self._kept.get(key)
        if features is not None:
            self._hits += 1
            self._kept.move_to_end(key)
            return features
        flight = self._flights.get(key)
        if flight is None:
            flight = self._depart(key, prepare)
        else:
            self._hits += 1
        flight.waiting += 1
        try:
            await flight.done.wait()
        finally:
            flight.waiting -= 1
            if not flight.waiting and not flight.done.is_set():
                self._close_to_others(flight)
                flight.scope.cancel(reason="nobody waits for the image any more")
        if flight.features is None:
            raise flight.error
        return flight.features

    def clear(self) -> None:
        """Forget all images, those that are under way too: who waits for them gets them, and nobody else.

        Does not wait for anything, and nothing else runs meanwhile.
        """
        self._kept.clear()
        self._bytes = 0
        for flight in list(self._flights.values()):
            flight.is_kept = False
            self._close_to_others(flight)

    def statistics(self) -> CacheStatistics:
        """Return what is kept and under way now."""
        return CacheStatistics(len(self._kept), self._bytes, self._hits, self._misses, self._in_flight)

    def _depart(self, key: Key, prepare: Prepare) -> _Flight:
        if self._nursery is None:
            raise UnavailableError("Images are not being prepared.")
        self._misses += 1
        self._in_flight += 1
        flight = self._flights[key] = _Flight(key, prepare)
        self._nursery.start_soon(self._fly, flight)
        return flight

    async def _fly(self, flight: _Flight) -> None:
        try:
            with flight.scope:
                flight.features = await flight.prepare()
        except Exception as error:  # theirs who wait
            flight.error = error
        finally:
            self._in_flight -= 1
            self._close_to_others(flight)
            if flight.features is not None and flight.is_kept:
                self._keep(flight.key, flight.features)
            flight.done.set()

    def _close_to_others(self, flight: _Flight) -> None:
        if self._flights.get(flight.key) is flight:
            del self._flights[flight.key]

    def _keep(self, key: Key, features: ImageFeatures) -> None:
        if features.nbytes > self.max_bytes:
            return
        replaced = self._kept.pop(key, None)
        self._bytes += features.nbytes - (replaced.nbytes if replaced is not None else 0)
        self._kept[key] = features
        while self._bytes > self.max_bytes:
            _, oldest = self._kept.popitem(last=False)
            self._bytes -= oldest.nbytes

    def __repr__(self) -> str:
        stats = self.statistics()
        return f"<MediaCache {stats.entries} in {stats.bytes}/{self.max_bytes} bytes, {stats.in_flight} in flight>"
