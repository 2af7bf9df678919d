"""Batches through the runner without a server, as many in flight at once as a server has."""

import math
import time
from collections.abc import Sequence

import trio
from attrs import define, field, frozen
from torch import Tensor
from torch.profiler import record_function

from benchmarks.gpu.loaded_runner import LoadedRunner
from trio_pool_serve.engine.local_device import MAX_IN_FLIGHT
from trio_pool_serve.runner.output_copy import Split
from trio_pool_serve.types import Batch, CopiedBatch, PooledBatch, PooledValue

LAUNCH = "launch of a batch"
"""The name of the launches in a profile."""


@frozen(kw_only=True)
class StreamResult:
    """Batches per second, and milliseconds from before a launch until the rows are there."""

    batches_per_s: float
    p50_ms: float
    p99_ms: float


class SynchronousCopier:
    """Copies while the launching thread waits, on the stream that computes: as ``tensor.cpu()`` does."""

    def start(self, tensors: Sequence[Tensor], split: Split) -> PooledBatch:
        """Return the rows."""
        return CopiedBatch(split([tensor.cpu().numpy() for tensor in tensors]))


@define
class BatchStream:
    """The same batch, again and again."""

    loaded: LoadedRunner
    batch: Batch
    latencies: list[float] = field(factory=list)

    async def run(self, seconds: float = math.inf, batches: float = math.inf) -> StreamResult:
        """Run for some time, or for some batches."""
        begin = trio.current_time()
        free = trio.Semaphore(MAX_IN_FLIGHT)
        async with trio.open_nursery() as nursery:
            while batches > 0 and (not self.latencies or trio.current_time() < begin + seconds):
                await free.acquire()
                started = time.perf_counter()
                handle = await self.loaded.offload.run("launch", self._launch)
                nursery.start_soon(self._finish, handle, started, free)
                batches -= 1
        took = trio.current_time() - begin
        milliseconds = sorted(1e3 * latency for latency in self.latencies)
        return StreamResult(
            batches_per_s=len(milliseconds) / took,
            p50_ms=milliseconds[len(milliseconds) // 2],
            p99_ms=milliseconds[math.ceil(0.99 * len(milliseconds)) - 1],
        )

    async def run_once(self) -> list[tuple[PooledValue, ...]]:
        """Return the rows of one batch."""
        return await (await self.loaded.offload.run("launch", self._launch))

    def _launch(self) -> PooledBatch:
        with record_function(LAUNCH):
            return self.loaded.runner.launch(self.batch)

    async def _finish(self, handle: PooledBatch, started: float, free: trio.Semaphore) -> None:
        await handle
        self.latencies.append(time.perf_counter() - started)
        free.release()
