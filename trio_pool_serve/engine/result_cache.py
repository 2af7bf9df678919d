"""A cache of rows' outputs, for inputs that are computed again and again. Used on the event loop only."""

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from typing import TypeAlias

import numpy as np
from attrs import define, field, frozen

from trio_pool_serve.types import PooledValue, SparseVector

Key: TypeAlias = tuple[Hashable, bytes]
"""A loaded model, and the digest of what it computes."""

ENTRY_BYTES = 512
"""Counted for each entry: its key, its tuple, and its place in the dictionary."""

ARRAY_BYTES = 128
"""Counted for each array besides its numbers. Together more than CPython takes, which is 346 to 412 bytes for an entry
of one array, and 500 to 604 for one of a ``SparseVector``."""

MAX_ROW_BYTES = 2**20
"""Of the outputs of one row, longer ones are not cached: they are copied on the event loop."""


@frozen
class ResultCacheStatistics:
    """Contents and counters of a cache. A hit is a row that was there, a miss one that was looked up and was not."""

    entries: int
    bytes: int
    hits: int
    misses: int
    evictions: int


@define(eq=False)
class ResultCache:
    """An LRU cache of at most ``max_bytes`` bytes of outputs, what Python takes for an entry included.

    Outputs are copied into it, and are read-only in it: requests share them.
    """

    max_bytes: int
    _entries: OrderedDict[Key, tuple[PooledValue, ...]] = field(init=False, factory=OrderedDict)
    _bytes: int = field(init=False, default=0)
    _hits: int = field(init=False, default=0)
    _misses: int = field(init=False, default=0)
    _evictions: int = field(init=False, default=0)

    def get(self, key: Key) -> tuple[PooledValue, ...] | None:
        """Return the outputs of a row, which must not be modified; ``None`` if they are not there."""
        values = self._entries.get(key)
        if values is None:
            self._misses += 1
            return None
        self._hits += 1
        self._entries.move_to_end(key)
        return values

    def put(self, key: Key, values: Sequence[PooledValue]) -> None:
        """Store copies of a row's outputs, and drop those used longest ago that do not fit beside them."""
        nbytes = _nbytes_of(values)
        if nbytes > min(self.max_bytes, MAX_ROW_BYTES):
            return
        self._drop(key)
        self._entries[key] = tuple(map(_read_only_copy, values))
        self._bytes += nbytes
        while self._bytes > self.max_bytes:
            self._drop(next(iter(self._entries)))
            self._evictions += 1

    def forget(self, model: Hashable) -> None:
        """Drop all outputs of a loaded model. Takes longer the more entries there are."""
        for key in [key for key in self._entries if key[0] == model]:
            self._drop(key)

    def _drop(self, key: Key) -> None:
        values = self._entries.pop(key, None)
        if values is not None:
            self._bytes -= _nbytes_of(values)

    def statistics(self) -> ResultCacheStatistics:
        """Return the current contents and counters."""
        return ResultCacheStatistics(len(self._entries), self._bytes, self._hits, self._misses, self._evictions)

    def __repr__(self) -> str:
        return f"<ResultCache {len(self._entries)} in {self._bytes}/{self.max_bytes} bytes>"


def _nbytes_of(values: Sequence[PooledValue]) -> int:
    arrays = [array for value in values for array in _arrays_of(value)]
    return ENTRY_BYTES + sum(ARRAY_BYTES + array.nbytes for array in arrays)


def _arrays_of(value: PooledValue) -> tuple[np.ndarray, ...]:
    return (value.indices, value.values) if isinstance(value, SparseVector) else (value,)


def _read_only_copy(value: PooledValue) -> PooledValue:
    """Return a copy: outputs share the memory of their whole batch, and a response may be made of them."""
    copies = [array.copy() for array in _arrays_of(value)]
    for array in copies:
        array.flags.writeable = False
    return SparseVector(*copies) if isinstance(value, SparseVector) else copies[0]
