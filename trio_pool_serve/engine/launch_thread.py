"""The devices of this process: threads that launch batches on a worker's runner."""

import logging
import math
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Literal, TypeAlias, TypeVar

import trio
from attrs import define, field

from trio_pool_serve.engine.batch_recovery import RETRY_S, BatchRecovery, Fault
from trio_pool_serve.engine.batching import BatchLimits
from trio_pool_serve.engine.device import Device, InFlightBatch, RowValues
from trio_pool_serve.engine.queue_entry import QueueEntry
from trio_pool_serve.errors import OutOfDeviceMemoryError, RunnerDeadError
from trio_pool_serve.types import PooledBatch

if TYPE_CHECKING:
    from trio_pool_serve.engine.worker import Worker

T = TypeVar("T")

logger = logging.getLogger(__name__)

MAX_IN_FLIGHT = 2
"""Batches of one launch thread that are launched and not yet copied to the host: while one is copied, the next is
computed."""

ThreadKind: TypeAlias = Literal["launch", "ahead", "background"]
"""ahead: while the others compute, launches the next batch, so that no core waits for the event loop.
background: launches planned batches, which are computed at idle priority."""


@define(eq=False, repr=False)
class LaunchThread(Device):
    """One of a worker's threads, with room for ``MAX_IN_FLIGHT`` batches.

    A batch that fails is computed again in parts here, so that nothing is sent again. Its exception is not kept: the
    traceback would keep tensors in memory.
    """

    worker: "Worker"
    kind: ThreadKind = "launch"
    _launching: trio.Lock = field(init=False, factory=trio.Lock)
    """Held for each launch: a batch that is computed again takes turns with new ones."""

    def __attrs_post_init__(self) -> None:
        self.short_batch = self.worker.short_batch
        self.takes_ahead, self.launches = self.kind == "ahead", int(self.kind == "launch")

    @property
    def room(self) -> int:  # noqa: D102
        if self.takes_ahead:
            worker = self.worker
            is_needed = worker.queue.tokens <= self.short_batch.tokens and worker.dispatcher.all_compute
            return 1 - len(self.in_flight) if is_needed and not worker.offload.waiting("launch") else 0
        return MAX_IN_FLIGHT - len(self.in_flight) if self.kind == "launch" else 0

    def planned_room(self, *, others_wait: bool) -> int:  # noqa: D102
        if self.kind == "background":
            return 1 - len(self.in_flight)
        return 0 if others_wait or self.takes_ahead or self.worker.loaded.background_launches else self.room

    @property
    def limits(self) -> BatchLimits:  # noqa: D102
        worker = self.worker
        # Rows that arrive meanwhile wait behind a batch that is taken ahead, so it is a short one.
        max_tokens = self.short_batch.tokens if self.takes_ahead else worker.budget.tokens
        return BatchLimits(max_tokens, self.short_batch.tokens, worker.loaded.pads)

    async def launch(self, batch: InFlightBatch) -> bool:  # noqa: D102
        metrics, rows = self.worker.metrics, batch.batch
        metrics.batch_rows.observe(len(batch.entries))
        metrics.batch_tokens.observe(rows.padded_tokens)
        metrics.tokens.inc(rows.tokens)
        metrics.padding_waste.observe(1 - rows.tokens / rows.padded_tokens)
        await self._launch(batch)
        return True

    async def collect(self, batch: InFlightBatch) -> RowValues | None:  # noqa: D102
        rows = await self._outputs(batch)
        if isinstance(rows, Fault):
            await self._recover(batch, rows)
            return None
        if rows is not None and not batch.is_planned:  # how long a planned one takes depends on other work
            batch.device_s = time.perf_counter() - max(batch.launched, self.freed_at)
            self.worker.budget.observe(self._budgeted_tokens(batch))
            self.worker.metrics.forward.observe(batch.forward_s)
            self.worker.metrics.copy_wait.observe(batch.copy_s)
        return rows

    async def _launch(self, batch: InFlightBatch) -> None:
        """Launch a batch, unless no client waits for any of its rows."""

        def launch() -> PooledBatch | None:
            if all(entry.is_abandoned for entry in batch.entries):
                return None
            return self.worker.loaded.launch(batch.batch)

        async with self._launching:
            batch.handle = await self._attempt(lambda: self.worker.run_in_thread(self.kind, launch), batch)
        batch.forward_s = time.perf_counter() - batch.launched

    async def _outputs(self, batch: InFlightBatch) -> RowValues | Fault | None:
        """Return the outputs of a batch, or how it failed; ``None`` if it was not launched."""
        if (handle := batch.handle) is None or isinstance(handle, Fault):
            return handle

        async def collect() -> RowValues:
            rows = await handle
            if len(rows) != len(batch.entries):
                raise ValueError(f"{len(rows)} answers to {len(batch.entries)} rows")
            self.worker.batches += 1
            return rows

        rows = await self._attempt(collect, batch)
        batch.copy_s = time.perf_counter() - batch.launched - batch.forward_s
        return rows

    async def _recover(self, batch: InFlightBatch, fault: Fault) -> None:
        """Compute the rows of a failed batch again, in parts, and settle them: see ``BatchRecovery``.

        Cancellation: at once; rows that are not settled stay so.
        """

        async def compute(entries: list[QueueEntry]) -> Fault | None:
            part = InFlightBatch(entries)
            batch.launched = part.launched
            await self._launch(part)
            rows = await self._outputs(part)
            if rows is None or isinstance(rows, Fault):
                return rows
            await part.deliver(rows)
            return None

        self.worker.failed_batches += 1
        recovery = BatchRecovery(compute, math.inf if batch.is_planned else RETRY_S)
        await recovery.run(batch.entries, fault)
        faults = self.worker.metrics.faults
        faults["failed_batches"].inc()
        faults["retries"].inc(recovery.passes)
        faults["failed_rows"].inc(recovery.failed_rows)

    def _budgeted_tokens(self, batch: InFlightBatch) -> int:
        """Return the tokens of a batch as the token budget counts them."""
        return batch.batch.padded_tokens if self.worker.loaded.pads else batch.batch.tokens

    async def _attempt(self, step: Callable[[], Awaitable[T]], batch: InFlightBatch) -> T | Fault:
        """Return what ``step`` returns, or how it failed. Raises ``RunnerDeadError``."""
        timeout_s, rows = self.worker.config.batch_timeout_s, len(batch.entries)
        try:
            with trio.fail_after(math.inf if batch.is_planned else timeout_s):
                return await step()
        except trio.TooSlowError as error:
            wedged = f"a batch has not come back for {timeout_s:g} s: the device is wedged"
            raise RunnerDeadError(wedged) from error
        except RunnerDeadError:
            raise
        except (OutOfDeviceMemoryError, MemoryError) as error:
            logger.warning("out of memory: a batch of %d rows, %d tokens: %s", rows, batch.batch.padded_tokens, error)
        except Exception:
            logger.exception("a batch of %d rows failed", rows)
            return Fault.RAISED
        # The exception is dropped by now, so that what it held can be freed.
        self.worker.metrics.faults["out_of_memory"].inc()
        if rows > 1:
            self.worker.budget.halve(self._budgeted_tokens(batch))
        await self.worker.return_memory()
        return Fault.OUT_OF_MEMORY
