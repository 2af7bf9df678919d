"""Graphs of the simulated device: operations that are recorded, and done again on the same memory."""

import gc
import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from attrs import frozen
from torch import Tensor
from torch.utils._pytree import tree_iter

from tests.simgpu.activity import LOCK, activities
from tests.simgpu.memory import MEMORY, Arena
from tests.simgpu.streams import ORDER, Stream, current_stream, stream

_captures = threading.local()
_pools = itertools.count(1)


@frozen(eq=False)
class Step:
    """One recorded operation."""

    function: Callable[..., Any]
    args: Any
    kwargs: dict[str, Any]
    outputs: Any
    mutates: bool

    def __call__(self) -> None:
        computed = self.function(*self.args, **self.kwargs)
        if not self.mutates:
            for target, source in zip(tree_iter(self.outputs), tree_iter(computed), strict=True):
                if isinstance(target, Tensor):
                    target.copy_(source)


class CUDAGraph:
    """As ``torch.cuda.CUDAGraph``."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.kept: list[Tensor] = []
        self.inputs: dict[int, Any] = {}
        self.pool_id: Any = None

    def __del__(self) -> None:
        with LOCK:
            arena = MEMORY.pools.get(self.pool_id)
            if arena is not None:
                arena.graphs -= 1
                if not arena.graphs:
                    del MEMORY.pools[self.pool_id]

    def pool(self) -> Any:
        """Return the number of the pool, for other captures."""
        return self.pool_id

    @property
    def arena(self) -> Arena:
        """Its pool's memory."""
        return MEMORY.pools[self.pool_id]

    def note(
        self, function: Any, args: Any, kwargs: Any, outputs: Any, *, mutates: bool, made: tuple[Any, ...]
    ) -> None:
        """Record an operation."""
        self.steps.append(Step(function, args, kwargs, outputs, mutates))
        for tensor in made:
            self.inputs[tensor.allocation.data_ptr] = None if tensor.allocation.pool else tensor

    def keep(self, views: list[Any]) -> None:
        """Keep what views are of: the recorded operations have them as arguments."""
        self.kept += [view.raw for view in views]

    def replay(self) -> None:
        """Do all operations again, as one launch."""
        with LOCK:
            ORDER.launch("graph", set(self.inputs) - {self.arena.data_ptr}, {self.arena.data_ptr})
            for activity in activities():
                activity.kernels["graph"] += 1
        for step in self.steps:
            step()


def capture_of_thread() -> CUDAGraph | None:
    """Return the graph that this thread captures."""
    found: CUDAGraph | None = getattr(_captures, "graph", None)
    return found


def graph_pool_handle() -> tuple[int, int]:
    """Return a new pool."""
    return next(_pools), 0


@contextmanager
def graph(
    captured: CUDAGraph, pool: Any = None, stream: Stream | None = None, capture_error_mode: str = "global"
) -> Iterator[None]:
    """Capture what this thread launches, as ``torch.cuda.graph``."""
    assert capture_error_mode == "thread_local", "other threads' allocations would end the capture"
    gc.collect()
    captured.pool_id = pool or graph_pool_handle()
    MEMORY.pools.setdefault(captured.pool_id, Arena()).graphs += 1
    with _on(stream or Stream()):
        _captures.graph = captured
        try:
            yield
        finally:
            _captures.graph = None


_on = stream
__all__ = ["CUDAGraph", "capture_of_thread", "current_stream", "graph", "graph_pool_handle"]
