"""A cache of prepared images, which prepares each image once for concurrent requests."""

from collections.abc import Awaitable, Callable
from typing import TypeAlias

import trio
from attrs import define, field, frozen

from trio_pool_serve.errors import UnavailableError
from trio_pool_serve.rendering.memory_budget import MemoryBudget
from trio_pool_serve.threads.lru_cache import CacheCounts, LruCache
from trio_pool_serve.types import ImageFeatures

Key: TypeAlias = tuple[str, bytes]
"""The key of an image processor, and the SHA-256 of the encoded image."""

Prepare: TypeAlias = Callable[[], Awaitable[ImageFeatures]]


@frozen
class CacheStatistics(CacheCounts):
    """Contents and counters of a cache. A hit is a request for an image that is cached or being prepared."""

    in_flight: int


@define(eq=False)
class _Preparation:
    """An image that is being prepared; cancelled when no request waits for it."""

    key: Key
    scope: trio.CancelScope = field(factory=trio.CancelScope, init=False)
    done: trio.Event = field(factory=trio.Event, init=False)
    waiting: int = field(default=0, init=False)
    features: ImageFeatures | None = field(default=None, init=False)
    error: Exception = field(factory=lambda: UnavailableError("The server is shutting down."), init=False)


@define(eq=False)
class MediaCache(LruCache[Key, ImageFeatures]):
    """An LRU cache of prepared images, of at most ``max_bytes`` bytes and at most the free bytes of ``memory``.

    Concurrent requests for an image share one preparation, also with ``max_bytes`` 0, when nothing is cached. Requests
    share the returned features, which must not be modified.
    """

    memory: MemoryBudget = field(factory=MemoryBudget)
    _preparations: dict[Key, _Preparation] = field(init=False, factory=dict)
    """Preparations that requests can join: not cancelled, and begun after the last ``clear``."""
    _nursery: trio.Nursery | None = field(init=False, default=None)

    def __attrs_post_init__(self) -> None:
        self.memory.cache = self

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Prepare images until cancelled.

        Cancellation: at once; waiting requests get ``UnavailableError``.
        """
        try:
            async with trio.open_nursery() as self._nursery:
                task_status.started()
                await trio.sleep_forever()
        finally:
            self._nursery = None

    async def get(self, key: Key, prepare: Prepare) -> ImageFeatures:
        """Return the cached features of a key, else the result of the preparation that runs, or of ``prepare()``.

        Raises the preparation's error, which is not cached; ``UnavailableError`` unless ``run`` runs.

        Cancellation: at once; a preparation is cancelled when no request waits for it.
        """
        await trio.lowlevel.checkpoint()
        if (features := self.find(key)) is not None:
            self.hits += 1
            return features
        preparation = self._preparations.get(key)
        if preparation is None:
            if self._nursery is None:
                raise UnavailableError("The server is not ready to prepare images.")
            self.misses += 1
            preparation = self._preparations[key] = _Preparation(key)
            self._nursery.start_soon(self._run_preparation, preparation, prepare)
        else:
            self.hits += 1
        preparation.waiting += 1
        try:
            await preparation.done.wait()
        finally:
            preparation.waiting -= 1
            if not preparation.waiting and not preparation.done.is_set():
                self._close(preparation)
                preparation.scope.cancel(reason="no request waits for the image")
        if preparation.features is None:
            raise preparation.error
        return preparation.features

    def clear(self) -> None:
        """Drop all images. Images being prepared are returned to the requests that wait, and not cached."""
        self.drop(*self.entries)
        self._preparations.clear()

    def statistics(self) -> CacheStatistics:
        """Return the current contents and counters."""
        in_flight = 0 if self._nursery is None else len(self._nursery.child_tasks)
        return CacheStatistics(len(self.entries), self.bytes, self.hits, self.misses, in_flight)

    async def _run_preparation(self, preparation: _Preparation, prepare: Prepare) -> None:
        try:
            with preparation.scope:
                preparation.features = await prepare()
        except Exception as error:  # raised by ``get`` for every waiting request
            preparation.error = error
        finally:
            features, most = preparation.features, min(self.max_bytes, self.memory.free_bytes)
            if self._close(preparation) and features is not None and features.nbytes <= most:
                self.put(preparation.key, features)
                self.evict(most)
            preparation.done.set()

    def _close(self, preparation: _Preparation) -> bool:
        """Let no other request join a preparation; return whether one could, so that its image may be cached."""
        is_open = self._preparations.get(preparation.key) is preparation
        if is_open:
            del self._preparations[preparation.key]
        return is_open

    def __repr__(self) -> str:
        stats = self.statistics()
        return f"<MediaCache {stats.entries} in {stats.bytes}/{self.max_bytes} bytes, {stats.in_flight} in flight>"
