"""The engine that computes in this process: queue, batches in flight, delivery of outputs."""

import logging
import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, closing
from functools import partial
from typing import TypeVar

import trio
from attrs import define, field

from trio_pool_serve.config import SchedulingConfig
from trio_pool_serve.engine.admission import Admission, AdmittedRequest, EstimatedWork, class_of
from trio_pool_serve.engine.batching import BulkBudget
from trio_pool_serve.engine.compute_rates import ComputeRates, SecondsPerToken, work_class
from trio_pool_serve.engine.engine import Engine, EngineState, EngineStatistics
from trio_pool_serve.engine.queue import QueueEntry, RequestQueue, batch_of, is_long
from trio_pool_serve.engine.small_requests import SmallRequests
from trio_pool_serve.errors import (
    BatchFailedError,
    DeadlineExceededError,
    EngineDeadError,
    EngineLoadingError,
    ModelLoadError,
    RunnerDeadError,
    innermost,
)
from trio_pool_serve.processes.allocator import RETURN_EVERY_S, return_freed_memory
from trio_pool_serve.telemetry.metrics import EngineMetrics, Gauges
from trio_pool_serve.threads.offload import Offload
from trio_pool_serve.types import Batch, PooledBatch, PoolingOutput, QueryScope, Runner

T = TypeVar("T")

logger = logging.getLogger(__name__)

DELIVERY_SLICE = 4
"""Rows delivered between two checkpoints. Each may wake a request, which is answered in half a millisecond or more: so
other requests, such as ``/health``, do not wait for all of a batch."""


MAX_AGE = 2.0
"""Times ``max_queue_s``: rows that have waited for longer come before all others."""


@define(eq=False)
class LaunchThread:
    """One of the threads that launch: a slot for each of its batches in flight, and when it last had one done."""

    slots: trio.Semaphore
    last_done: float = 0.0


@define(eq=False)
class LocalEngine(Engine):
    """Queues rows and launches them in batches on one runner.

    ``load()`` returns the runner; it is called in a thread. A batch is formed when it can be launched, so batches grow
    with the load and there is no timeout to wait for more rows. At most ``max_in_flight`` batches are in flight for
    each of the threads in which the runner can launch.
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
    _state: EngineState = field(default="loading", init=False)
    _settled: trio.Event = field(init=False, factory=trio.Event)
    _queue: RequestQueue = field(init=False)
    _admission: Admission = field(init=False)
    _rates: ComputeRates = field(init=False, factory=ComputeRates)
    _bulk: BulkBudget = field(init=False)
    _in_flight: dict[Batch, tuple[float, list[QueueEntry]]] = field(init=False, factory=dict)
    _last_done: float = field(default=0.0, init=False)
    _launched: int = field(default=0, init=False)
    _batches: int = field(default=0, init=False)
    _failed_batches: int = field(default=0, init=False)

    def __attrs_post_init__(self) -> None:
        self._queue = RequestQueue(
            is_fair=self.config.fairness == "client",
            max_age_s=MAX_AGE * self.config.max_queue_s,
            small_requests=self.small_requests,
        )
        self._bulk = BulkBudget(self.config.bulk_batch_s)
        self._admission = Admission(
            self.config.max_queue_s, lambda: self.seconds_per_token, is_fair=self.config.fairness == "client"
        )
        self.metrics.add_gauges(self._gauges)

    def submit_nowait(self, entry: QueueEntry) -> None:  # noqa: D102
        self._require_ready()
        if not entry.request.tokens:
            raise BatchFailedError("An input has no tokens.")
        self._queue.put_nowait(entry)

    def withdraw(self, entry: QueueEntry) -> None:  # noqa: D102
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
        return self.config.max_batch_tokens or self._loaded.default_batch_tokens

    @property
    def cosine_with_float32(self) -> float | None:  # noqa: D102
        return self._loaded.cosine_with_float32

    @property
    def _loaded(self) -> Runner:
        self._require_ready()
        assert self.runner is not None  # noqa: S101  (ready means loaded)
        return self.runner

    async def wait_ready(self) -> None:  # noqa: D102
        await self._settled.wait()
        self._require_ready()

    def statistics(self) -> EngineStatistics:  # noqa: D102
        now = time.perf_counter()
        return EngineStatistics(
            state=self._state,
            queued_rows=len(self._queue),
            queued_tokens=self._queue.tokens,
            in_flight_batches=len(self._in_flight),
            oldest_in_flight_s=max((now - launched for launched, _ in self._in_flight.values()), default=0.0),
            admitted_tokens=self._admission.tokens,
            waiting_s=self._admission.waiting_s,
            tokens_per_s=self.tokens_per_s,
            batches=self._batches,
            failed_batches=self._failed_batches,
            held_bytes=self.runner.held_bytes if self.runner else 0,
        )

    @property
    def waiting_tokens(self) -> int:
        """Tokens of all rows that are queued or in flight."""
        return self._queue.tokens + sum(batch.tokens for batch in self._in_flight)

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
            self.runner = await self.offload.run("load", _contain_exits(self.load))
            self._state = "ready"
            self._settled.set()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._return_freed_memory)
                self._queue.pads = self.runner.pads
                for _ in range(self.runner.concurrent_launches):
                    nursery.start_soon(self._compute, self.runner, nursery)
        except ModelLoadError:
            raise
        except Exception as error:
            cause = innermost(error)
            raise EngineDeadError(f"The engine stopped: {type(cause).__name__}: {cause}") from cause
        finally:
            self._fail_all()
            self.offload.close()

    async def _return_freed_memory(self) -> None:
        """Return what loading, and later batches, have freed: between two batches, so that none waits for the heap."""
        returned = -1
        while True:
            await trio.sleep(RETURN_EVERY_S)
            if (launched := self._launched) != returned:
                returned = launched
                own_threads = self.runner is not None and self.runner.has_own_threads
                await self.offload.run("launch", self.return_freed_memory, lowers_priority=not own_threads)

    async def _compute(self, runner: Runner, nursery: trio.Nursery) -> None:
        max_tokens = self.max_batch_tokens
        thread = LaunchThread(trio.Semaphore(self.config.max_in_flight))
        while True:
            await thread.slots.acquire()
            await self._queue.wait_not_empty()
            while not (entries := self._take_batch(runner, max_tokens)):
                await self._queue.wait_change()
            batch = batch_of(entries)
            launched = time.perf_counter()
            self._launched += 1
            self._in_flight[batch] = (launched, entries)
            self._observe_batch(batch, entries, launched)
            handle = await self._launch(runner, batch)
            if handle is None:
                thread.slots.release()
            else:
                nursery.start_soon(self._deliver, batch, handle, thread)

    def _take_batch(self, runner: Runner, max_tokens: int) -> list[QueueEntry]:
        """Take a batch; of long rows only if another thread stays free for short ones, or is not to be kept free."""
        computing_long = sum(is_long(batch.requests[0]) for batch in self._in_flight)
        leaves_long = 0 < runner.concurrent_launches - 1 <= computing_long
        entries = self._queue.take_batch(max_tokens, self._bulk.tokens, leaves_long=leaves_long)
        return self._without_late(entries)

    def _without_late(self, entries: list[QueueEntry]) -> list[QueueEntry]:
        """Return the entries that can be answered before their deadline, and fail the others.

        How long a batch takes counts only while others wait: an estimate that is wrong is corrected by batches only.
        """
        if all(entry.request.deadline == math.inf for entry in entries):
            return entries
        seconds = 0.0
        if len(self._queue):
            rates = self.seconds_per_token
            seconds = sum(entry.request.tokens * rates[class_of(entry.request.prompt)] for entry in entries)
        done_at = trio.current_time() + (seconds if math.isfinite(seconds) else 0.0)
        for late in [entry for entry in entries if entry.request.deadline < done_at]:
            late.fail(DeadlineExceededError("The deadline would pass before this input is computed."))
            entries.remove(late)
        return entries

    async def _launch(self, runner: Runner, batch: Batch) -> PooledBatch | None:
        try:
            with trio.fail_after(self.config.batch_timeout_s):
                launch = _contain_exits(partial(runner.launch, batch))
                return await self.offload.run("launch", launch, lowers_priority=not runner.has_own_threads)
        except Exception as error:
            self._fail_batch(batch, error)
            return None

    async def _deliver(self, batch: Batch, handle: PooledBatch, thread: LaunchThread) -> None:
        launched, entries = self._in_flight[batch]
        forward_s = time.perf_counter() - launched
        try:
            with trio.fail_after(self.config.batch_timeout_s):
                rows = await handle
            if len(rows) != len(entries):
                raise ValueError(f"{len(rows)} answers to {len(entries)} rows")  # noqa: TRY301
        except Exception as error:
            self._fail_batch(batch, error)
            return
        finally:
            thread.slots.release()
        now = time.perf_counter()
        took = now - launched
        self._batches += 1
        # Without the time in which the batch before was computed: by any thread, and by the same one.
        self._observe_rate(batch, now - max(launched, self._last_done))
        self._bulk.observe(batch.tokens, now - max(launched, thread.last_done))
        self._last_done = thread.last_done = now
        self.metrics.forward.observe(forward_s)
        self.metrics.copy_wait.observe(took - forward_s)
        for row, (entry, values) in enumerate(zip(entries, rows, strict=True)):
            if row and row % DELIVERY_SLICE == 0:
                await trio.lowlevel.checkpoint()
            entry.finish(
                PoolingOutput(
                    values=values,
                    queue_s=launched - entry.queued_at,
                    forward_s=forward_s,
                    copy_s=took - forward_s,
                )
            )
        # Not earlier: on cancellation between two slices ``_fail_all`` fails the rest.
        del self._in_flight[batch]
        self._queue.note_change()  # long rows that were left to its thread may be taken

    def _fail_batch(self, batch: Batch, error: Exception) -> None:
        """Fail the rows of one batch; raise ``RunnerDeadError`` if no later batch can succeed."""
        if isinstance(error, trio.TooSlowError):
            wedged = f"a batch has not come back for {self.config.batch_timeout_s:g} s: the device is wedged"
            raise RunnerDeadError(wedged) from error
        if isinstance(error, RunnerDeadError):
            raise error
        _, entries = self._in_flight.pop(batch)
        self._queue.note_change()
        self._failed_batches += 1
        logger.error("a batch of %d rows failed; its requests get an error", len(entries), exc_info=error)
        for entry in entries:
            entry.fail(BatchFailedError("The forward pass failed for this input's batch."))

    def _fail_all(self) -> None:
        self._state = "dead"
        self._settled.set()
        waiting = [*self._queue, *(entry for _, entries in self._in_flight.values() for entry in entries)]
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

    def _observe_rate(self, batch: Batch, seconds: float) -> None:
        has_images = batch.requests[0].prompt.images is not None
        measured = work_class(batch.tokens // len(batch.requests), has_images=has_images)
        self._rates.observe(measured, batch.tokens, seconds, left_waiting=len(self._queue) > 0)

    def _observe_batch(self, batch: Batch, entries: list[QueueEntry], launched: float) -> None:
        for entry in entries:
            self.metrics.queue.observe(launched - entry.queued_at)
        self.metrics.batch_rows.observe(len(entries))
        self.metrics.batch_tokens.observe(batch.padded_tokens)
        self.metrics.tokens.inc(batch.tokens)
        self.metrics.padding_waste.observe(1 - batch.tokens / batch.padded_tokens)

    def _gauges(self) -> Gauges:
        now = self.statistics()
        return {
            "engine": {
                "ready": float(now.state == "ready"),
                "queued_rows": now.queued_rows,
                "queued_tokens": now.queued_tokens,
                "in_flight_batches": now.in_flight_batches,
                "oldest_in_flight_seconds": now.oldest_in_flight_s,
                "admitted_tokens": now.admitted_tokens,
                "waiting_seconds": now.waiting_s,
                "held_bytes": now.held_bytes,
            }
        }

    def __repr__(self) -> str:
        return f"<LocalEngine {self._state}, {self._queue!r}, {len(self._in_flight)} batches in flight>"


def _contain_exits(blocking: Callable[[], T]) -> Callable[[], T]:
    """Wrap runner code: what is no ``Exception``, such as ``SystemExit``, is raised as ``RunnerDeadError``."""

    def run() -> T:
        try:
            return blocking()
        except Exception:
            raise
        except BaseException as error:
            raise RunnerDeadError(f"the runner raised {error!r}") from error

    return run
