"""A runner with its loading, memory, token budget and state, and the threads that launch batches on it."""

import logging
import math
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import ClassVar, Literal, NoReturn, TypeAlias, TypeVar

import trio
from attrs import define, field

from trio_pool_serve.config import SchedulingConfig
from trio_pool_serve.engine.batch_recovery import RETRY_S, BatchRecovery, Fault
from trio_pool_serve.engine.batching import BatchLimits, ShortBatchBudget, TokenBudget
from trio_pool_serve.engine.compute_rates import SecondsPerToken
from trio_pool_serve.engine.device import Device, InFlightBatch, RowValues
from trio_pool_serve.engine.dispatcher import Dispatcher
from trio_pool_serve.engine.engine_statistics import EngineState, EngineStatistics, ModelMemory
from trio_pool_serve.engine.queue_entry import QueueEntry, Submission, fail_unsettled, require_finite
from trio_pool_serve.engine.remote.wire import DeviceFacts
from trio_pool_serve.errors import (
    AdapterError,
    EngineDeadError,
    ModelLoadError,
    OutOfDeviceMemoryError,
    PoolServeError,
    RunnerDeadError,
    forget_frames,
    innermost,
)
from trio_pool_serve.processes.allocator import RETURN_EVERY_S, return_freed_memory
from trio_pool_serve.processes.child_process import TICKS
from trio_pool_serve.telemetry.metrics import EngineMetrics
from trio_pool_serve.threads.offload import Offload
from trio_pool_serve.types import ComputedBy, PooledBatch, PoolingRequest, Runner

T = TypeVar("T")

logger = logging.getLogger(__name__)

MAX_IN_FLIGHT = 2
"""Batches of one launch thread that are launched and not yet copied to the host: while one is copied, the next is
computed."""

ThreadKind: TypeAlias = Literal["launch", "ahead", "background"]
"""ahead: while the others compute, launches the next batch, so that no core waits for the event loop.
background: launches planned batches, which are computed at idle priority."""


@define(eq=False, repr=False)
class Worker:
    """Computes the rows that its dispatcher takes on one runner, which ``load()`` returns; it is called in a thread.

    A batch is formed when it can be launched: batches grow with the load, and no row waits for others to arrive.
    """

    loading_message: ClassVar[str] = "The model is being loaded."
    load: Callable[[], Runner]
    offload: Offload
    metrics: EngineMetrics
    config: SchedulingConfig = field(factory=SchedulingConfig)
    dispatcher: Dispatcher = field(init=False)
    """Set by the engine or device server that this computes for."""
    runner: Runner | None = field(default=None, init=False)
    computed_by: ComputedBy = field(default=ComputedBy(), init=False)
    memory: ModelMemory = field(init=False, factory=ModelMemory)
    budget: TokenBudget = field(init=False, factory=lambda: TokenBudget(0))
    short_batch: ShortBatchBudget = field(init=False, factory=ShortBatchBudget)
    batches: int = field(default=0, init=False)
    failed_batches: int = field(default=0, init=False)
    _ticks: dict[trio.CancelScope, float] = field(init=False, factory=dict)
    """For how many ticks each launch and each copy has been waited for."""

    def __attrs_post_init__(self) -> None:
        self.metrics.add_gauges(self.memory.gauges)

    async def run(self) -> None:
        """Load the model and compute a first row; then compute the batches that the dispatcher takes, until cancelled.

        Raises ``ModelLoadError`` if the model cannot be loaded or cannot compute, and ``EngineDeadError`` if no later
        batch can succeed; all waiting rows have failed by then. Cancellation: at once, all waiting rows fail; a call
        that loads or launches is abandoned to its thread.
        """
        try:
            threads = await self._load()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._keep_returning_memory)
                nursery.start_soon(self._count_ticks)
                await self._compute_one(threads[0])
                for thread in threads:
                    nursery.start_soon(self.dispatcher.pull, [thread], nursery)
                self.dispatcher.devices = [*threads]
                self.dispatcher.note_room()
        except Exception as error:
            if isinstance(cause := innermost(error), ModelLoadError):
                raise cause from cause.__cause__
            raise EngineDeadError(f"The engine stopped: {type(cause).__name__}: {cause}") from cause
        finally:
            self.dispatcher.close()
            self.offload.close()

    def shared(self, rates: SecondsPerToken) -> SecondsPerToken:
        """Return the rates unchanged: the device is not shared with other processes."""
        return rates

    def note_admitted(self) -> None:
        """Do nothing: the device is not shared with other processes."""

    @property
    def takes_rows(self) -> bool:
        """Whether the model is loaded."""
        return bool(self.dispatcher.devices)

    @property
    def stall_reason(self) -> str:
        """Why no batches return; empty if they do."""
        oldest_s = self.dispatcher.oldest_in_flight_s
        return f"a batch has been in flight for {oldest_s:.0f} s" if oldest_s > self.config.stall_timeout_s else ""

    @property
    def state(self) -> EngineState:
        """Its state."""
        if self.dispatcher.is_closed:
            return "dead"
        return "loading" if not self.takes_rows else "stalled" if self.stall_reason else "ready"

    def statistics(self) -> EngineStatistics:
        """Return the state and the load, without admitted requests."""
        dispatcher = self.dispatcher
        return EngineStatistics(
            state=self.state,
            queued_rows=len(dispatcher.source),
            queued_tokens=dispatcher.source.tokens,
            in_flight_batches=len(dispatcher.in_flight),
            oldest_in_flight_s=dispatcher.oldest_in_flight_s,
            tokens_per_s=sum([each.tokens_per_s for each in dispatcher.devices if each.launches]),
            batches=self.batches,
            failed_batches=self.failed_batches,
            batch_token_budget=self.budget.tokens,
            memory_bytes=self.memory.resident_bytes,
        )

    @property
    def loaded(self) -> Runner:
        """The runner; read it only once the model is loaded."""
        assert self.runner is not None  # noqa: S101  (the model is loaded)
        return self.runner

    @property
    def probe_request(self) -> PoolingRequest | None:
        """The runner's."""
        return self.loaded.probe_request

    @cached_property  # read several times for each request
    def facts(self) -> DeviceFacts:
        """Facts about the loaded model."""
        runner, probe = self.loaded, self.probe_request
        return DeviceFacts(
            runner.dimensions,
            runner.embeds_width,
            self.budget.max_tokens,
            runner.cosine_with_float32,
            None if probe is None else (probe.prompt.token_ids.tolist(), probe.params[0].wire_name),
        )

    async def _load(self) -> "list[LaunchThread]":
        runner = self.runner = await self.run_in_thread("load", self.memory.measured()(self.load))

        def prepare() -> int:
            budget = runner.prepare(self.config.wanted_batch_tokens)
            runner.return_memory()
            return budget

        # After the other models of the start, which have waited since this one began to load: the limiter is fair.
        self.budget = TokenBudget(await self.run_in_thread("load", self.memory.measured()(prepare)))
        if (about := getattr(runner, "description", None)) is not None:  # runners of other programs may lack it
            self.computed_by = ComputedBy(about.fingerprint, about.dtype, about.backend)
        self.offload.note_launch()
        threads = [LaunchThread(self) for _ in range(runner.concurrent_launches)]
        if runner.has_own_threads:
            threads.append(LaunchThread(self, "ahead"))
        return threads + [LaunchThread(self, "background") for _ in range(runner.background_launches)]

    async def _compute_one(self, thread: "LaunchThread") -> None:
        """Compute a row in the same way as later ones. Raises ``ModelLoadError`` if that fails."""
        if (request := self.probe_request) is None:
            return
        submission = Submission([request], require_finite)
        batch = InFlightBatch([*submission.entries])
        await thread.launch(batch)
        if (rows := await thread.collect(batch)) is not None:
            await batch.deliver(rows)
        try:
            await submission.wait()
        except PoolServeError as error:
            raise ModelLoadError(f"The model was loaded, but cannot compute a batch: {error}") from error

    async def run_in_thread(self, kind: ThreadKind | Literal["load"], blocking: Callable[[], T]) -> T:
        """Run ``blocking()`` in a thread that loads or launches, and return its result.

        Raises ``RunnerDeadError`` instead of a ``BaseException`` that is not an ``Exception``, such as ``SystemExit``.
        Cancellation: at once; a call that has begun is left to its thread.
        """

        def contained() -> T:
            try:
                return blocking()
            except Exception:
                raise
            except BaseException as error:
                raise RunnerDeadError(f"the runner raised {error!r}") from error

        return await self.offload.run(
            kind, contained, lowers_priority=kind == "load" or not self.loaded.has_own_threads
        )

    @contextmanager
    def limited(self, batch: InFlightBatch) -> Iterator[None]:
        """Raise ``RunnerDeadError`` if the block takes longer than the batch timeout, or up to a sixth more.

        Time is counted in ticks: a process that was stopped has not waited. Background work has no limit.
        """
        with trio.CancelScope() as limit:
            self._ticks[limit] = -math.inf if batch.is_planned else 0
            try:
                yield
            finally:
                del self._ticks[limit]
        if limit.cancelled_caught:
            raise RunnerDeadError(f"a batch takes more than {self.config.batch_timeout_s:g} s: the device is wedged")

    async def _count_ticks(self) -> NoReturn:
        while True:
            await trio.sleep(self.config.batch_timeout_s / TICKS)
            for limit in self._ticks:
                self._ticks[limit] += 1
                if self._ticks[limit] > TICKS:
                    limit.cancel(reason="the batch takes too long")

    async def return_memory(self) -> None:
        """Return freed memory between two batches, so that no batch waits for the heap. Cancellation: at once."""
        await self.run_in_thread("launch", self.loaded.return_memory)
        await self.run_in_thread("launch", return_freed_memory)

    async def _keep_returning_memory(self) -> None:
        """Return memory freed by loading, then every ``RETURN_EVERY_S`` if batches were computed meanwhile."""
        returned = -1
        while True:
            await trio.sleep(RETURN_EVERY_S)
            if (done := self.batches + self.failed_batches) != returned:
                returned = done
                await self.return_memory()


@define(eq=False, repr=False)
class LaunchThread(Device):
    """One of a worker's threads, with room for ``MAX_IN_FLIGHT`` batches.

    A batch that fails is computed again in parts here, so that nothing is sent again. Its exception is not kept: the
    traceback would keep tensors in memory.
    """

    worker: Worker
    kind: ThreadKind = "launch"
    _launching: trio.Lock = field(init=False, factory=trio.Lock)
    """Held for each launch: a batch that is computed again takes turns with new ones."""

    def __attrs_post_init__(self) -> None:
        self.short_batch = self.worker.short_batch
        self.takes_ahead, self.launches = self.kind == "ahead", int(self.kind == "launch")

    @property
    def room(self) -> int:  # noqa: D102
        if self.takes_ahead:
            dispatcher = self.worker.dispatcher
            is_needed = dispatcher.source.tokens <= self.short_batch.tokens and dispatcher.all_compute
            return 1 - len(self.in_flight) if is_needed and not self.worker.offload.waiting("launch") else 0
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
            if batch.batch.adapter is not None and not self.worker.loaded.takes_adapters:
                raise AdapterError("The backend of this model does not support adapters. Use --backend torch.")
            return self.worker.loaded.launch(batch.batch)

        async with self._launching:
            batch.handle = await self._attempt(lambda: self.worker.run_in_thread(self.kind, launch), batch)
        batch.forward_s = time.perf_counter() - batch.launched

    async def _outputs(self, batch: InFlightBatch) -> RowValues | Fault | None:
        """Return the outputs of a batch, or how it failed; ``None`` if it was not launched, or if its rows failed."""
        if (handle := batch.handle) is None or isinstance(handle, Fault):
            return handle

        async def collect() -> RowValues:
            rows = await handle
            if len(rows) != len(batch.entries):
                raise ValueError(f"{len(rows)} outputs for {len(batch.entries)} rows")
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

    async def _attempt(self, step: Callable[[], Awaitable[T]], batch: InFlightBatch) -> T | Fault | None:
        """Return what ``step`` returns, or how it failed; ``None`` if all rows failed for their adapter.

        Raises ``RunnerDeadError``.
        """
        rows = len(batch.entries)
        try:
            with self.worker.limited(batch):
                return await step()
        except RunnerDeadError:
            raise
        except AdapterError as error:
            logger.warning("a batch of %d rows failed: %s", rows, error)
            self.worker.metrics.faults["failed_rows"].inc(rows)
            forget_frames(error)
            fail_unsettled(batch.entries, error)
            return None
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
