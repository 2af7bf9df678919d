"""The simulated device's memory: allocations by stream, a capacity, and pools of graphs."""

import itertools
from typing import Any
from weakref import WeakValueDictionary

import torch
from attrs import define, field
from torch import Tensor

from tests.simgpu.activity import LOCK, activities
from tests.simgpu.streams import ORDER, Stream, current_stream

BLOCK_BYTES = 512
"""CUDA's allocator rounds up to this."""

_ids = itertools.count(1)


class SimulatedOutOfMemoryError(torch.OutOfMemoryError):
    """An allocation that exceeds the capacity."""


@define(eq=False)
class Arena:
    """Memory that streams allocate from: the device's, or that of one pool of graphs.

    Freed memory is used again on the stream that it was allocated on only, as by CUDA's allocator for pools; so a pool
    reserves the most that each stream has ever used.
    """

    live: dict[int, int] = field(factory=dict)
    most: dict[int, int] = field(factory=dict)
    graphs: int = 0
    """Those that use the pool: it is freed with the last of them."""
    data_ptr: int = field(factory=lambda: next(_ids))

    def add(self, stream: int, nbytes: int) -> None:
        """Count an allocation, or a free with negative ``nbytes``."""
        self.live[stream] = self.live.get(stream, 0) + nbytes
        self.most[stream] = max(self.most.get(stream, 0), self.live[stream])

    @property
    def reserved(self) -> int:
        """Bytes that a pool has."""
        return sum(self.most.values())


@define(eq=False)
class Memory:
    """Of one device. ``capacity`` may be set by tests."""

    capacity: int | None = None
    limit: int | None = None
    """Bytes that this process may use."""
    allocated: int = 0
    """Bytes of tensors outside of graphs."""
    peak: int = 0
    pools: dict[Any, Arena] = field(factory=dict)

    @property
    def in_use(self) -> int:
        """Bytes of tensors and of graphs' pools."""
        return self.allocated + sum(pool.reserved for pool in self.pools.values())

    def require(self, nbytes: int) -> None:
        """Raise ``torch.OutOfMemoryError`` if so many bytes are not free."""
        for most in (self.capacity, self.limit):
            if most is not None and self.in_use + nbytes > most:
                raise SimulatedOutOfMemoryError(
                    f"simulated out of memory: {nbytes} bytes, {self.in_use} of {most} are in use"
                )

    def note_peak(self, temporary: int = 0) -> None:
        """Count bytes that a kernel has needed for itself."""
        self.peak = max(self.peak, self.in_use + temporary)


MEMORY = Memory()


class Allocation:
    """Memory of one tensor and of its views."""

    def __init__(self, nbytes: int, pool: Arena | None) -> None:
        self.nbytes = 0  # of an allocation that fails
        rounded = -(-nbytes // BLOCK_BYTES) * BLOCK_BYTES
        self.pool = pool
        self.stream: Stream = current_stream()
        self.other_streams: set[int] = set()
        self.uses: dict[int, int] = {}
        self.data_ptr = next(_ids) if pool is None else pool.data_ptr
        with LOCK:
            MEMORY.require(rounded if pool is None else 0)
            self.nbytes = rounded
            if pool is None:
                MEMORY.allocated += rounded
            else:
                pool.add(self.stream.number, rounded)
            MEMORY.note_peak()

    def __del__(self) -> None:
        with LOCK:
            if self.pool is not None:
                self.pool.add(self.stream.number, -self.nbytes)
                return
            MEMORY.allocated -= self.nbytes
            ORDER.handler.tensors_accessed.accesses.pop(self.data_ptr, None)
            for stream, seq in self.uses.items():
                if stream not in (self.stream.number, *self.other_streams) and not ORDER.is_done(
                    self.stream.number, stream, seq
                ):
                    for activity in activities():
                        activity.races.append(f"memory is freed while stream {stream} uses it")


_allocations: "WeakValueDictionary[int, Allocation]" = WeakValueDictionary()


def allocation_of(raw: Tensor, pool: Arena | None) -> Allocation:
    """Return the allocation of a tensor's storage, made now for a storage that has none."""
    storage = raw.untyped_storage()
    with LOCK:
        known = _allocations.get(storage._cdata)
        if known is None:
            known = _allocations[storage._cdata] = Allocation(storage.nbytes(), pool)
        return known
