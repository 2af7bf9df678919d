"""The device of a model in this process: its token budget, and the threads that launch batches on its runner."""

import logging
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import NoReturn, TypeVar

import trio
from attrs import define, field

from trio_pool_serve.config import SchedulingConfig
from trio_pool_serve.engine.background_work import background_room
from trio_pool_serve.engine.batch_recovery import RETRY_S, BatchRecovery, Fault
from trio_pool_serve.engine.batching import BatchLimits, TokenBudget
from trio_pool_serve.engine.device import Device, InFlightBatch, RowValues, ThreadKind
from trio_pool_serve.engine.queue_entry import QueueEntry, fail_unsettled
from trio_pool_serve.errors import AdapterError, OutOfDeviceMemoryError, RunnerDeadError, forget_frames
from trio_pool_serve.processes.allocator import RETURN_EVERY_S, return_freed_memory
from trio_pool_serve.processes.child_process import TICKS
from trio_pool_serve.telemetry.metrics import EngineMetrics
from trio_pool_serve.threads.dedicated_threads import acquire
from trio_pool_serve.threads.offload import Offload
from trio_pool_serve.types import PooledBatch, Runner

T = TypeVar("T")

logger = logging.getLogger(__name__)

MAX_IN_FLIGHT = 2
"""Batches of one launch thread that are launched and not yet copied to the host: while one is copied, the next is
computed."""


@define(eq=False, repr=False)
class LocalDevice(Device):
    """Computes batches on ``runner``: each of its launch threads has room for ``MAX_IN_FLIGHT``.

    A batch that fails is computed again in parts here, so that nothing is sent again. Its exception is not kept: the
    traceback would keep tensors in memory.
    """

    takes_rows = True  # while it is here at all; a device that is stalled says so when its batch takes too long
    stall_reason = ""
    runner: Runner
    offload: Offload
    metrics: EngineMetrics
    config: SchedulingConfig
    budget: TokenBudget = field(init=False)
    batches: int = field(default=0, init=False)
    failed_batches: int = field(default=0, init=False)
    _launching: int = field(default=0, init=False)
    """Batches whose launch in a thread of kind ``launch`` has not returned."""
    _turns: dict[ThreadKind, trio.CapacityLimiter] = field(init=False)
    """Limiters by kind of launch, of which each launch holds one: batches computed again take turns with new ones."""
    _ticks: dict[object, float] = field(init=False, factory=dict)
    """For how many ticks each launch, each copy and each step of ``improve`` has been waited for."""

    def __attrs_post_init__(self) -> None:
        facts = self.facts = self.runner.facts
        self.budget, self.launches = TokenBudget(facts.max_batch_tokens), facts.concurrent_launches
        self._turns = {"launch": trio.CapacityLimiter(self.launches)}
        if facts.has_own_threads:
            self._turns["ahead"] = trio.CapacityLimiter(1)
        if facts.background_launches:
            self._turns["background"] = trio.CapacityLimiter(facts.background_launches)

    @property
    def most_launches(self) -> int:
        """How many batches may be launched at a time, of all kinds."""
        return sum([int(each.total_tokens) for each in self._turns.values()])

    @property
    def room(self) -> int:  # noqa: D102
        # Both limits: the threads that launch, and the batches that a GPU has or copies while the next is launched.
        own = [batch.kind for batch in self.in_flight].count("launch")
        return min(self.launches - self._launching, MAX_IN_FLIGHT * self.launches - own)

    @property
    def ahead_room(self) -> int:  # noqa: D102
        # If another model waits for a thread, it is the next one to compute.
        if "ahead" not in self._turns or self.offload.waiting("launch"):
            return 0
        return 1 - [batch.kind for batch in self.in_flight].count("ahead")

    def planned_room(self, *, others_wait: bool) -> int:  # noqa: D102
        launched = [batch.kind for batch in self.in_flight].count("background")
        return background_room(self.facts.background_launches, launched, room=self.room, others_wait=others_wait)

    @property
    def limits(self) -> BatchLimits:  # noqa: D102
        return BatchLimits(self.budget.tokens, self.passes.short_tokens, self.facts.pads)

    @property
    def tokens_per_s(self) -> float:
        """Tokens of all its passes per second, as a moving average; 0 before the first batch."""
        return self.launches * self.passes.tokens_per_s

    async def launch(self, batch: InFlightBatch) -> bool:  # noqa: D102
        metrics, tokens, padded = self.metrics, batch.batch.tokens, batch.batch.padded_tokens
        metrics.batch_rows.observe(len(batch.entries))
        metrics.batch_tokens.observe(padded)
        metrics.tokens.inc(tokens)
        metrics.padding_waste.observe(1 - tokens / padded)
        # The runner computes ``launches`` at a time; a further batch waits inside it, and its time begins later.
        if "ahead" in self._turns and not batch.is_planned:
            batch.waits = sum([not each.is_planned for each in self.in_flight]) > self.launches
        if batch.is_planned and "background" in self._turns:
            batch.kind = "background"
        self._launching += batch.kind == "launch"
        try:
            await self._launch(batch)
        finally:
            self._launching -= batch.kind == "launch"
        return True

    def note_freed(self, batches: Sequence[InFlightBatch]) -> None:  # noqa: D102
        super().note_freed(batches)
        waiting = [each for each in self.in_flight if each.waits and each.handle is None]
        if waiting and not batches[0].is_planned:  # planned batches run in the time that others leave
            waiting[0].waits, waiting[0].launched = False, self.freed_at

    async def collect(self, batch: InFlightBatch) -> RowValues | None:  # noqa: D102
        rows = await self._outputs(batch)
        if isinstance(rows, Fault):
            await self._recover(batch, rows)
            return None
        if rows is not None and not batch.is_planned:  # how long a planned one takes depends on other work
            # Launches of several threads compute beside each other; of one thread, each waits for the one before.
            began = batch.launched if self.launches > 1 else max(batch.launched, self.freed_at)
            batch.device_s = time.perf_counter() - began
            self.budget.observe(self._budgeted_tokens(batch))
            self.metrics.forward.observe(batch.forward_s)
            self.metrics.copy_wait.observe(batch.copy_s)
        return rows

    async def _launch(self, batch: InFlightBatch) -> None:
        """Launch a batch, unless no client waits for any of its rows."""

        def launch() -> PooledBatch | None:
            # In the thread: rows may have been withdrawn while the launch waited for its turn.
            if all(entry.is_abandoned for entry in batch.entries):
                return None
            if batch.batch.adapter is not None and not self.facts.takes_adapters:
                raise AdapterError("The backend of this model does not support adapters. Use --backend torch.")
            return self.runner.launch(batch.batch)

        # Runners allow no more launches at a time; other models may leave the limiter of all threads free.
        turn = self._turns[batch.kind]
        await acquire(turn, batch)
        try:
            batch.handle = await self._attempt(partial(self._in_thread, batch.kind, launch), batch)
        finally:
            turn.release_on_behalf_of(batch)
        batch.forward_s = time.perf_counter() - batch.launched

    async def _in_thread(self, kind: ThreadKind, blocking: Callable[[], T]) -> T:
        # If a runner computes in its own threads, this one does little but hold the interpreter lock. At low priority,
        # it would hold it while it waits for a core, and the event loop would wait, too.
        return await self.offload.run(kind, blocking, lowers_priority=not self.facts.has_own_threads)

    async def _outputs(self, batch: InFlightBatch) -> RowValues | Fault | None:
        """Return the outputs of a batch, or how it failed; ``None`` if it was not launched, or if its rows failed."""
        if (handle := batch.handle) is None or isinstance(handle, Fault):
            return handle

        async def collect() -> RowValues:
            rows = await handle
            if len(rows) != len(batch.entries):  # a row must never get another's output
                raise ValueError(f"{len(rows)} outputs for {len(batch.entries)} rows")
            self.batches += 1
            return rows

        rows = await self._attempt(collect, batch)
        batch.copy_s = time.perf_counter() - batch.launched - batch.forward_s
        return rows

    async def _recover(self, batch: InFlightBatch, fault: Fault) -> None:
        """Compute the rows of a failed batch again, in parts, and settle them: see ``BatchRecovery``.

        Cancellation: at once; rows that are not settled stay so.
        """

        async def compute(entries: list[QueueEntry]) -> Fault | None:
            part = InFlightBatch(entries, kind=batch.kind)
            batch.launched = part.launched  # a stall is counted from the newest part
            await self._launch(part)
            rows = await self._outputs(part)
            if rows is None or isinstance(rows, Fault):
                return rows
            await part.deliver(rows)
            return None

        self.failed_batches += 1
        recovery = BatchRecovery(compute, math.inf if batch.is_planned else RETRY_S)
        await recovery.run(batch.entries, fault)
        faults = self.metrics.faults
        faults["failed_batches"].inc()
        faults["retries"].inc(recovery.passes)
        faults["failed_rows"].inc(recovery.failed_rows)

    def _budgeted_tokens(self, batch: InFlightBatch) -> int:
        """Return the tokens of a batch as the token budget counts them."""
        return batch.batch.padded_tokens if self.facts.pads else batch.batch.tokens

    async def _attempt(self, step: Callable[[], Awaitable[T]], batch: InFlightBatch) -> T | Fault | None:
        """Return what ``step`` returns, or how it failed; ``None`` if all rows failed for their adapter.

        Raises ``RunnerDeadError``.
        """
        rows = len(batch.entries)
        self._ticks[batch] = -math.inf if batch.is_planned else 0
        try:
            return await step()
        except RunnerDeadError:  # it would be tried again, in vain
            raise
        except AdapterError as error:
            logger.warning("a batch of %d rows failed: %s", rows, error)
            self.metrics.faults["failed_rows"].inc(rows)
            forget_frames(error)  # the rows keep the error, and its frames would keep the batch's tensors
            fail_unsettled(batch.entries, error)
            return None
        except (OutOfDeviceMemoryError, MemoryError) as error:
            logger.warning("out of memory: a batch of %d rows, %d tokens: %s", rows, batch.batch.padded_tokens, error)
        except Exception:
            logger.exception("a batch of %d rows failed", rows)
            return Fault.RAISED
        finally:
            del self._ticks[batch]
        # The exception is dropped by now, so that what it held can be freed.
        self.metrics.faults["out_of_memory"].inc()
        if rows > 1:  # of a single row, no smaller batch can be made
            self.budget.halve(self._budgeted_tokens(batch))
        await self._return_memory()
        return Fault.OUT_OF_MEMORY

    async def count_ticks(self) -> NoReturn:
        """Raise ``RunnerDeadError`` once one of ``_ticks`` takes longer than the batch timeout, or up to a sixth more.

        Time is counted in ticks: a process that was stopped has not waited. Background work has no limit.
        Cancellation: at once.
        """
        while max(self._ticks.values(), default=0) <= TICKS:  # the first tick may have come right after the launch
            await trio.sleep(self.config.batch_timeout_s / TICKS)
            for batch in self._ticks:
                self._ticks[batch] += 1
        raise RunnerDeadError(f"a batch takes more than {self.config.batch_timeout_s:g} s: the device is wedged")

    async def improve(self) -> bool:
        """Prepare what makes the runner faster, and change over to it between batches; return whether all of it is.

        Failures are logged. Cancellation: at once; a call that has begun is left to its thread.
        """
        began = time.perf_counter()
        try:
            for prepare in self.facts.improvements:
                for step in await self.offload.run("compile", prepare):
                    async with self._turns["launch"]:
                        self._ticks[step] = 0
                        try:
                            await self._in_thread("launch", step)
                        finally:
                            del self._ticks[step]
        except Exception as error:
            logger.warning("the model could not be compiled: %s", next(iter(str(error).splitlines()), repr(error)))
            return False
        if self.facts.improvements:
            logger.info(
                "compiled code computes from now on, %.1f s after the model was ready", time.perf_counter() - began
            )
        return bool(self.facts.improvements)

    async def _return_memory(self) -> None:
        """Return freed memory between two batches, so that no batch waits for the heap."""
        await self._in_thread("launch", self.runner.return_memory)
        await self._in_thread("launch", return_freed_memory)

    async def keep_returning_memory(self) -> NoReturn:
        """Return memory freed by loading, then every ``RETURN_EVERY_S`` if batches were computed meanwhile.

        Cancellation: at once; a call that has begun is left to its thread.
        """
        returned = -1  # not 0: loading has freed memory before any batch
        while True:
            await trio.sleep(RETURN_EVERY_S)
            if (done := self.batches + self.failed_batches) != returned:
                returned = done
                await self._return_memory()
