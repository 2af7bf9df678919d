"""A cache that is bounded in bytes and drops the least recently used values first. Used on the event loop only."""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from operator import attrgetter
from typing import Generic, TypeVar

from attrs import define, field, frozen

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


@frozen
class CacheCounts:
    """The contents of a cache, and the lookups since the start."""

    entries: int
    bytes: int
    hits: int
    misses: int


@define(eq=False)
class LruCache(Generic[Key, Value]):
    """Values of at most ``max_bytes`` bytes in all, of which ``nbytes_of`` returns each one's."""

    max_bytes: int
    nbytes_of: Callable[[Value], int] = field(default=attrgetter("nbytes"), kw_only=True)
    bytes: int = field(default=0, init=False)
    hits: int = field(default=0, init=False)
    misses: int = field(default=0, init=False)
    """The callers count both: for some of them, a lookup that finds nothing may still be a hit."""
    evictions: int = field(default=0, init=False)
    """Number of values that were dropped to make room."""
    entries: OrderedDict[Key, Value] = field(factory=OrderedDict, init=False)
    """The least recently used first."""

    def find(self, key: Key) -> Value | None:
        """Return a cached value, which counts as used now; ``None`` if there is none."""
        if key in self.entries:
            self.entries.move_to_end(key)
        return self.entries.get(key)

    def put(self, key: Key, value: Value) -> None:
        """Store a value of at most ``max_bytes`` bytes, and evict others to make room."""
        self.drop(key)
        self.entries[key] = value
        self.bytes += self.nbytes_of(value)
        self.evict(self.max_bytes)

    def evict(self, max_bytes: int) -> None:
        """Drop the least recently used values until at most ``max_bytes`` bytes are cached."""
        while self.bytes > max_bytes:
            self.drop(next(iter(self.entries)))
            self.evictions += 1

    def drop(self, *keys: Key) -> None:
        """Drop the values of these keys, if they are cached."""
        for key in keys:
            if key in self.entries:
                self.bytes -= self.nbytes_of(self.entries.pop(key))
