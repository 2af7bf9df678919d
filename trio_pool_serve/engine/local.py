"""The engine that computes in this process: queue, batches in flight, delivery of outputs."""

import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, closing

import trio
from attrs import define, field

from trio_pool_serve.config import SchedulingConfig
from trio_pool_serve.engine.admission import Admission, AdmittedRequest, EstimatedWork, class_of
from trio_pool_serve.engine.batch_recovery import RETRY_S, BatchRecovery, Fault
from trio_pool_serve.engine.batching import BulkBudget, TokenBudget
from trio_pool_serve.engine.compute_rates import ComputeRates, DrainClock, SecondsPerToken, work_class
from trio_pool_serve.engine.engine import Engine, EngineState, EngineStatistics, Submission, require_finite
from trio_pool_serve.engine.forward_passes import (
    ForwardPasses,
    InFlightBatch,
    InFlightBatches,
    LaunchThread,
    contain_exits,
)
from trio_pool_serve.engine.model_memory import ModelMemory
from trio_pool_serve.engine.queue import RequestQueue, batch_of, is_long
from trio_pool_serve.engine.queue_entry import QueueEntry
from trio_pool_serve.engine.small_requests import SmallRequests
from trio_pool_serve.errors import (
    BatchFailedError,
    DeadlineExceededError,
    EngineDeadError,
    EngineLoadingError,
    ModelLoadError,
    PoolServeError,
    innermost,
)
from trio_pool_serve.processes.allocator import RETURN_EVERY_S, return_freed_memory
from trio_pool_serve.telemetry.metrics import EngineMetrics
from trio_pool_serve.threads.offload import Offload
from trio_pool_serve.types import Batch, PooledBatch, PoolingRequest, QueryScope, Runner

MAX_IN_FLIGHT = 2
"""Batches of one launch thread that are launched and not yet copied to the host: one is copied while the next one is
computed."""

MAX_AGE = 2.0
"""Times ``max_queue_s``: rows that have waited for longer open every second batch."""


@define(eq=False)
class LocalEngine(Engine):
    """Queues rows and launches them in batches on one runner.

    ``load()`` returns the runner; it is called in a thread. A batch is formed when it can be launched: batches grow
    with the load, and no row waits for more. At most ``MAX_IN_FLIGHT`` are in flight for each thread that can launch.
    """

    load: Callable[[], Runner]
    offload: Offload
    metrics: EngineMetrics
    config: SchedulingConfig = field(factory=SchedulingConfig)
    small_requests: SmallRequests = field(factory=SmallRequests)
    """Shared with the model's other replicas, if any."""
    return_freed_memory: Callable[[], None] = return_freed_memory
    """Called in the thread that launches, every ``RETURN_EVERY_S`` seconds in which there were batches."""
    runner: Runner | None = field(default=None, init=False)
    memory: ModelMemory = field(init=False, factory=ModelMemory)
    _state: EngineState = field(default="loading", init=False)
    _settled: trio.Event = field(init=False, factory=trio.Event)
    _queue: RequestQueue = field(init=False)
    _admission: Admission = field(init=False)
    _rates: ComputeRates = field(init=False, factory=ComputeRates)
    _bulk: BulkBudget = field(init=False, factory=BulkBudget)
    _budget: TokenBudget = field(init=False, factory=lambda: TokenBudget(0))  # until the model is loaded
    _in_flight: InFlightBatches = field(init=False)
    _drain_clock: DrainClock = field(init=False, factory=DrainClock)
    _launched: int = field(default=0, init=False)
    _batches: int = field(default=0, init=False)
    _failed_batches: int = field(default=0, init=False)

    def __attrs_post_init__(self) -> None:
        self._queue = RequestQueue(max_age_s=MAX_AGE * self.config.max_queue_s, small_requests=self.small_requests)
        self._in_flight = InFlightBatches(self.metrics.busy)
        self._admission = Admission(self.config.max_queue_s, lambda: self.seconds_per_token)
        self.metrics.add_gauges(lambda: {**self.statistics().gauges(), **self.memory.gauges()})

    def submit_nowait(self, *entries: QueueEntry) -> None:  # noqa: D102
        self._require_ready()
        for empty in [entry for entry in entries if not len(entry.request.prompt.token_ids)]:
            empty.fail(BatchFailedError("An input has no tokens."))
            entries = tuple([entry for entry in entries if entry is not empty])
        self._queue.put_nowait(*entries)

    def withdraw(self, entry: QueueEntry) -> None:  # noqa: D102
        entry.is_abandoned = True
        self._queue.withdraw(entry)

    def admit(self, work: EstimatedWork) -> AbstractContextManager[AdmittedRequest]:  # noqa: D102
        self._require_ready()
        return self._admission.admit(work)

    def refuse_late(self, work: EstimatedWork) -> None:  # noqa: D102
        self._require_ready()
        self._admission.refuse_late(work)

    def open_scope(self) -> AbstractContextManager[QueryScope]:  # noqa: D102
        return closing(self._loaded.open_scope())

    @property
    def dimensions(self) -> int:  # noqa: D102
        return self._loaded.dimensions

    @property
    def embeds_width(self) -> int:  # noqa: D102
        return self._loaded.embeds_width

    @property
    def max_batch_tokens(self) -> int:  # noqa: D102
        return self._budget.max_tokens

    @property
    def cosine_with_float32(self) -> float | None:  # noqa: D102
        return self._loaded.cosine_with_float32

    @property
    def probe_request(self) -> PoolingRequest | None:  # noqa: D102
        return self._loaded.probe_request

    @property
    def stall_reason(self) -> str:  # noqa: D102
        oldest_s = self._in_flight.oldest_s
        is_stalled = oldest_s > self.config.stall_timeout_s
        return f"a batch has been in flight for {oldest_s:.0f} s" if is_stalled else ""

    def is_overloaded(self, waited_s: float = 0.0) -> bool:  # noqa: D102
        return self._admission.is_full(waited_s)

    @property
    def _loaded(self) -> Runner:
        self._require_ready()
        assert self.runner is not None  # noqa: S101  (ready means loaded)
        return self.runner

    async def wait_ready(self) -> None:  # noqa: D102
        await self._settled.wait()
        self._require_ready()

    @property
    def state(self) -> EngineState:  # noqa: D102
        return "stalled" if self._state == "ready" and self.stall_reason else self._state

    def statistics(self) -> EngineStatistics:  # noqa: D102
        return EngineStatistics(
            state=self.state,
            queued_rows=len(self._queue),
            queued_tokens=self._queue.tokens,
            in_flight_batches=len(self._in_flight),
            oldest_in_flight_s=self._in_flight.oldest_s,
            admitted_tokens=self._admission.tokens,
            waiting_s=self._admission.waiting_s,
            tokens_per_s=self.tokens_per_s,
            batches=self._batches,
            failed_batches=self._failed_batches,
            held_bytes=getattr(self.runner, "held_bytes", 0),  # which a thread drops when the model is unloaded
            batch_token_budget=self._budget.tokens,
        )

    @property
    def waiting_tokens(self) -> int:
        """Tokens of all rows that are queued or in flight, without those of background work."""
        return self._queue.tokens + sum(
            in_flight.batch.tokens for in_flight in self._in_flight if not in_flight.is_background
        )

    @property
    def tokens_per_s(self) -> float:
        """Tokens computed per second, as a moving average; 0 before the first batch."""
        return self._rates.tokens_per_s

    @property
    def seconds_per_token(self) -> SecondsPerToken:
        """The measured rates by work class."""
        return self._rates.seconds_per_token

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:  # noqa: D102
        task_status.started()
        try:
            # Loading cannot be interrupted: a process that is to exit meanwhile does not wait for it.
            runner = self.runner = await self.offload.run("load", contain_exits(self.memory.measured()(self.load)))
            # Behind the other models of the start, which wait since this one began to be loaded: the limiter is fair.
            prepare = self.memory.measured()(lambda: runner.prepare(self.config.wanted_batch_tokens))
            self._budget = TokenBudget(await self.offload.run("load", contain_exits(prepare)))
            self._queue.pads = runner.pads
            self._queue.takes_background = not runner.background_launches
            passes = ForwardPasses(runner, self.offload, self.config.batch_timeout_s)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._return_freed_memory)
                for _ in range(runner.concurrent_launches):
                    nursery.start_soon(self._compute, passes, nursery)
                for _ in range(runner.background_launches):
                    nursery.start_soon(self._compute_background, passes, nursery)
                await self._compute_one(runner.probe_request)
                self._state = "ready"
                self._settled.set()
        except Exception as error:
            if isinstance(cause := innermost(error), ModelLoadError):
                raise cause from cause.__cause__
            raise EngineDeadError(f"The engine stopped: {type(cause).__name__}: {cause}") from cause
        finally:
            self._fail_all()
            self.offload.close()

    async def _compute_one(self, request: PoolingRequest | None) -> None:
        """Compute a row through queue and device. Raises ``ModelLoadError`` if that fails."""
        if request is None:
            return
        submission = Submission([request], require_finite)
        self._queue.put_nowait(*submission.entries)
        try:
            await submission.wait()
        except PoolServeError as error:
            raise ModelLoadError(f"The model was loaded, but cannot compute a batch: {error}") from error

    async def _return_freed_memory(self) -> None:
        """Return what loading, and later batches, have freed: between two batches, so that none waits for the heap."""
        returned = -1
        while True:
            await trio.sleep(RETURN_EVERY_S)
            if self._launched != returned:
                returned = self._launched
                await self._return_memory()

    async def _return_memory(self) -> None:
        lowers_priority = self.runner is None or not self.runner.has_own_threads
        await self.offload.run("launch", self.return_freed_memory, lowers_priority=lowers_priority)

    async def _compute(self, passes: ForwardPasses, nursery: trio.Nursery) -> None:
        thread = LaunchThread(trio.Semaphore(MAX_IN_FLIGHT))
        while True:
            await thread.slots.acquire()
            if not len(self._queue):
                self._drain_clock.note_idle()
            await self._queue.wait_not_empty()
            while not (entries := self._take_batch(passes.runner)):
                await self._queue.wait_change()
            await self._launch(entries, passes, nursery, thread)

    async def _compute_background(self, passes: ForwardPasses, nursery: trio.Nursery) -> None:
        thread = LaunchThread(trio.Semaphore(1), "background")
        while True:
            await thread.slots.acquire()
            while not (entries := self._queue.background.take_batch()):
                await self._queue.wait_change()
            await self._launch(entries, passes, nursery, thread)

    async def _launch(
        self, entries: list[QueueEntry], passes: ForwardPasses, nursery: trio.Nursery, thread: LaunchThread
    ) -> None:
        """Launch a batch; another task settles its rows, and releases its slot."""
        in_flight = InFlightBatch(batch_of(entries), entries, is_background=thread.kind == "background")
        self._launched += 1
        self._in_flight.add(in_flight)
        in_flight.observe(self.metrics)
        handle = await passes.launch(in_flight, thread)
        if handle is None:
            self._forget(in_flight)
            thread.slots.release()
        else:
            nursery.start_soon(self._finish, passes, in_flight, handle, thread)

    def _take_batch(self, runner: Runner) -> list[QueueEntry]:
        """Take a batch; of long rows only if another thread stays free for short ones, or is not to be kept free."""
        computing_long = sum(not each.is_background and is_long(each.batch.requests[0]) for each in self._in_flight)
        leaves_long = 0 < runner.concurrent_launches - 1 <= computing_long
        while entries := self._queue.take_batch(self._budget.tokens, self._bulk.tokens, leaves_long=leaves_long):
            if in_time := self._without_late(entries):
                return in_time
        self._drain_clock.note_idle()
        return []

    def _without_late(self, entries: list[QueueEntry]) -> list[QueueEntry]:
        """Return the entries that can be answered before their deadline, and fail the others.

        How long a batch takes counts only while others wait: an estimate that is wrong is corrected by batches only.
        """
        soonest = min([entry.request.deadline for entry in entries])
        if soonest == math.inf:
            return entries
        seconds = 0.0
        if len(self._queue):
            rates = self.seconds_per_token
            most_tokens = max(self._budget.tokens, entries[0].request.tokens)
            if soonest >= trio.current_time() + most_tokens * float(rates.max()):
                return entries
            seconds = sum(entry.request.tokens * rates[class_of(entry.request.prompt)] for entry in entries)
        done_at = trio.current_time() + (seconds if math.isfinite(seconds) else 0.0)
        for late in [entry for entry in entries if entry.request.deadline < done_at]:
            late.fail(DeadlineExceededError("The deadline would pass before this input is computed."))
            entries.remove(late)
        return entries

    async def _finish(
        self, passes: ForwardPasses, in_flight: InFlightBatch, handle: PooledBatch | Fault, thread: LaunchThread
    ) -> None:
        """Settle the rows of a batch, and release its slot."""
        rows = await passes.collect(in_flight, handle)
        if isinstance(rows, Fault):
            await self._recover(passes, in_flight, rows, thread)
            thread.slots.release()
        else:
            thread.slots.release()
            self._observe_speed(in_flight, thread)
            await in_flight.deliver(rows)
        # Not earlier: on cancellation before, ``_fail_all`` fails the rows that are left.
        self._forget(in_flight)

    async def _recover(
        self, passes: ForwardPasses, in_flight: InFlightBatch, fault: Fault, thread: LaunchThread
    ) -> None:
        """Compute the rows of a batch that failed again, in parts: see ``BatchRecovery``."""

        async def compute(entries: list[QueueEntry]) -> Fault | None:
            part = InFlightBatch(batch_of(entries), entries, in_flight.is_background)
            in_flight.launched = part.launched
            handle = await passes.launch(part, thread)
            if handle is None:
                return None
            rows = await passes.collect(part, handle)
            if isinstance(rows, Fault):
                await self._note_fault(part.batch, rows)
                return rows
            self._batches += 1
            await part.deliver(rows)
            return None

        self._failed_batches += 1
        await self._note_fault(in_flight.batch, fault)
        recovery = BatchRecovery(compute, math.inf if in_flight.is_background else RETRY_S)
        await recovery.run(in_flight.entries, fault)
        thread.last_done = self._drain_clock.restart()
        self.metrics.faults["failed_batches"].inc()
        self.metrics.faults["retries"].inc(recovery.passes)
        self.metrics.faults["failed_rows"].inc(recovery.failed_rows)

    async def _note_fault(self, batch: Batch, fault: Fault) -> None:
        if fault is not Fault.OUT_OF_MEMORY:
            return
        self.metrics.faults["out_of_memory"].inc()
        if len(batch.requests) > 1:
            self._budget.halve(self._budgeted_tokens(batch))
        await self._return_memory()

    def _budgeted_tokens(self, batch: Batch) -> int:
        return batch.padded_tokens if self._queue.pads else batch.tokens

    def _observe_speed(self, in_flight: InFlightBatch, thread: LaunchThread) -> None:
        batch, launched, now = in_flight.batch, in_flight.launched, time.perf_counter()
        self._batches += 1
        if in_flight.is_background:
            return  # how long it took depends on what others computed
        self._budget.observe(self._budgeted_tokens(batch))
        # Without the time in which the batch before was computed: by any thread, and by the same one.
        left_waiting = len(self._queue) > 0
        seconds = self._drain_clock.note_done(launched, now, left_waiting=left_waiting)
        measured = work_class(
            batch.tokens // len(batch.requests), has_images=batch.requests[0].prompt.images is not None
        )
        self._rates.observe(measured, batch.tokens, seconds, left_waiting=left_waiting)
        self._bulk.observe(batch.tokens, now - max(launched, thread.last_done))
        thread.last_done = now
        self.metrics.forward.observe(in_flight.forward_s)
        self.metrics.copy_wait.observe(in_flight.copy_s)

    def _forget(self, in_flight: InFlightBatch) -> None:
        self._in_flight.discard(in_flight)
        self._queue.note_change()  # long rows that were left to its thread may be taken

    def _fail_all(self) -> None:
        self._state = "dead"
        self._settled.set()
        waiting = [*self._queue, *(entry for in_flight in self._in_flight for entry in in_flight.entries)]
        self._in_flight.clear()
        for entry in waiting:
            self._queue.withdraw(entry)
            if not entry.is_settled:
                entry.fail(EngineDeadError("The engine has stopped."))

    def _require_ready(self) -> None:
        if self._state == "loading":
            raise EngineLoadingError("The model is being loaded.")
        if self._state == "dead":
            raise EngineDeadError("The engine has stopped.")

    def __repr__(self) -> str:
        return f"<LocalEngine {self._state}, {self._queue!r}, {len(self._in_flight)} batches in flight>"
