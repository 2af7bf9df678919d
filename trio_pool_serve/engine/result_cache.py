"""A cache of rows' outputs, for inputs that are computed again and again. Used on the event loop only.

``ResultCache`` is shared by all models; ``ModelResults`` looks up the rows of one loaded model in it.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import TypeAlias

import msgspec
import numpy as np
import trio
from attrs import define, evolve, field, frozen

from trio_pool_serve.engine.admission import EstimatedWork
from trio_pool_serve.engine.engine import Engine
from trio_pool_serve.engine.queue_entry import Outputs, RowsDone, row_digest
from trio_pool_serve.telemetry.timings import RequestTimings
from trio_pool_serve.threads.lru_cache import CacheCounts, LruCache
from trio_pool_serve.threads.moving_average import MovingAverage
from trio_pool_serve.types import (
    PooledValue,
    PoolingOutput,
    PoolingParams,
    PoolingRequest,
    SparseVector,
)

Key: TypeAlias = tuple[Hashable, bytes]
"""A loaded model, and the digest of a row's input and params."""

ENTRY_BYTES = 512
"""Overhead counted for each entry: its key, its tuple, and its place in the dictionary."""

ARRAY_BYTES = 128
"""Overhead counted for each array. Together this is more than CPython takes: 346 to 412 bytes for an entry of one
array, and 500 to 604 for a ``SparseVector``."""

MAX_ROW_BYTES = 2**20
"""Larger outputs of a row are not cached: they are copied on the event loop."""


def _nbytes_of(values: Sequence[PooledValue]) -> int:
    return ENTRY_BYTES + sum(ARRAY_BYTES + array.nbytes for value in values for array in _arrays_of(value))


def _arrays_of(value: PooledValue) -> tuple[np.ndarray, ...]:
    return (value.indices, value.values) if isinstance(value, SparseVector) else (value,)


def _read_only_copy(value: PooledValue) -> PooledValue:
    """Return a copy: outputs share the memory of their whole batch, and a response may be made of them."""
    copies = [array.copy() for array in _arrays_of(value)]
    for array in copies:
        array.flags.writeable = False
    return SparseVector(*copies) if isinstance(value, SparseVector) else copies[0]


@frozen
class ResultCacheStatistics(CacheCounts):
    """Contents and counters of a cache. A hit is a row found in it, a miss a row that was looked up and not found."""

    evictions: int


@define(eq=False)
class ResultCache(LruCache[Key, tuple[PooledValue, ...]]):
    """An LRU cache of at most ``max_bytes`` bytes of outputs, including Python's overhead.

    Outputs are copied into it and are read-only: requests share them.
    """

    nbytes_of: Callable[[tuple[PooledValue, ...]], int] = field(default=_nbytes_of, init=False)

    def put(self, key: Key, value: tuple[PooledValue, ...]) -> None:
        """Store copies of a row's outputs, and evict the least recently used to make room."""
        if _nbytes_of(value) <= min(self.max_bytes, MAX_ROW_BYTES):
            super().put(key, tuple(map(_read_only_copy, value)))

    def forget(self, model: Hashable) -> None:
        """Drop all outputs of a loaded model. Time grows with the number of entries."""
        self.drop(*[key for key in self.entries if key[0] == model])

    def statistics(self) -> ResultCacheStatistics:
        """Return the current contents and counters."""
        return ResultCacheStatistics(len(self.entries), self.bytes, self.hits, self.misses, self.evictions)

    def __repr__(self) -> str:
        return f"<ResultCache {len(self.entries)} in {self.bytes}/{self.max_bytes} bytes>"


@define(eq=False)
class ModelResults:
    """The results of one loaded model in a cache that all models share; a model that is loaded again has none.

    Only rows of token ids are looked up, not images or token embeddings, whose digest would take longer, and not rows
    that are scored against a query's vectors. Equal rows in flight at the same time are computed for each request: the
    later one would otherwise inherit the place in the queue, the priority and the failures of the earlier one.
    """

    cache: ResultCache
    _missing_share: MovingAverage = field(init=False, factory=lambda: MovingAverage(value=1.0, is_known=True))
    """Share of looked-up rows that are not cached."""
    _is_cleared: bool = field(init=False, default=False)

    def to_compute(self, work: EstimatedWork) -> EstimatedWork:
        """Return a request's estimated work without the rows expected to be cached.

        Otherwise requests would be refused because of others whose rows are cached, until these are tokenised, by rates
        that are not measured again while nothing is computed.
        """
        return evolve(work, tokens=int(work.tokens * self._missing_share.value))

    async def submit_all(
        self, engine: Engine, requests: Sequence[PoolingRequest], rows_done: RowsDone, timings: RequestTimings
    ) -> None:
        """Call ``rows_done`` with the outputs of all rows: cached rows at once, others when they are computed.

        A row is cached once it is computed and ``rows_done`` has accepted it. Raises and is cancelled as
        ``Engine.submit_all``; cancelled rows are not cached.
        """
        keys = self._keys_of(requests)
        found = [None if key is None else self.cache.find(key) for key in keys]
        missing = [index for index, values in enumerate(found) if values is None]
        looked_up, cached = len(keys) - keys.count(None), len(keys) - len(missing)
        timings.looked_up += looked_up
        timings.cached += cached
        self.cache.hits += cached
        self.cache.misses += looked_up - cached
        if looked_up:
            self._missing_share.observe(1 - cached / looked_up)
        if cached:
            rows_done([(index, PoolingOutput(of, 0.0, 0.0, 0.0)) for index, of in enumerate(found) if of is not None])

        def computed(outputs: Outputs) -> None:
            outputs = [(missing[number], output) for number, output in outputs]
            rows_done(outputs)
            for index, output in outputs:
                if (key := keys[index]) is not None and not self._is_cleared:
                    self.cache.put(key, output.values)

        if missing:
            await engine.submit_all([requests[index] for index in missing], computed)
        else:
            await trio.lowlevel.checkpoint()

    def clear(self) -> None:
        """Drop the results and cache no more, not even rows in flight: the model is being unloaded."""
        self._is_cleared = True
        self.cache.forget(self)

    def _keys_of(self, requests: Sequence[PoolingRequest]) -> list[Key | None]:
        """Return the keys of rows; ``None`` for rows that are not looked up."""
        keys: list[Key | None] = []
        params, encoded = None, None
        for request in requests:
            if request.params is not params:  # the rows of a request share them
                params, encoded = request.params, _encoded(request.params)
            is_looked_up = encoded is not None and request.prompt.images is None and request.prompt.embeds is None
            keys.append((self, row_digest(request, encoded or b"")) if is_looked_up else None)
        return keys


def _encoded(params: Sequence[PoolingParams]) -> bytes | None:
    """Return bytes that are equal for equal params; ``None`` if params cannot be encoded, such as arrays."""
    try:
        return msgspec.msgpack.encode([(param.wire_name, param) for param in params])
    except Exception:  # fields of params may be of any type
        return None
