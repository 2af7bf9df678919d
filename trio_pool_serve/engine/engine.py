"""The engine of one model: its queue, and the devices that compute what waits there."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar

import trio
from attrs import define, evolve, field

from trio_pool_serve.config import SchedulingConfig
from trio_pool_serve.engine.admission import Admission, AdmittedRequest, EstimatedWork
from trio_pool_serve.engine.dispatcher import STOPPED, Dispatcher
from trio_pool_serve.engine.engine_statistics import EngineState, ModelMemory, QueueStatistics
from trio_pool_serve.engine.lost_rows import LostRows
from trio_pool_serve.engine.queue_entry import QueueEntry, RowsDone, Submission
from trio_pool_serve.engine.scheduler import Scheduler
from trio_pool_serve.engine.speed import ComputeRates
from trio_pool_serve.errors import BatchFailedError, EngineDeadError, EngineLoadingError
from trio_pool_serve.telemetry.metrics import EngineMetrics
from trio_pool_serve.types import PoolingOutput, PoolingRequest, RunnerFacts

MAX_AGE = 2.0
"""Times ``max_queue_s``: rows that have waited for longer open every second batch."""


@define(eq=False)
class ModelQueue:
    """Admission, scheduler and dispatcher of one model. ``zone`` is that of this process."""

    max_queue_s: float
    metrics: EngineMetrics
    zone: str = ""
    rates: ComputeRates = field(init=False, factory=ComputeRates)
    scheduler: Scheduler = field(init=False)
    dispatcher: Dispatcher = field(init=False)
    admission: Admission = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.scheduler = Scheduler(MAX_AGE * self.max_queue_s, self.rates)
        self.dispatcher = Dispatcher(
            self.scheduler,
            self.metrics.busy,
            lambda batch: self.metrics.queue.observe_all([batch.launched - entry.queued_at for entry in batch.entries]),
            self.zone,
            self.rates,
            LostRows(self.scheduler.put_nowait),
        )
        self.admission = Admission(self.max_queue_s, self.rates)


@define(eq=False)
class Devices(ABC):
    """The devices that compute the batches of one dispatcher: a ``Worker`` in this process, or ``RemoteWorkers``."""

    is_local: ClassVar[bool] = False
    """Whether it computes in this process."""
    loading_message: ClassVar[str]
    """Why no rows are taken while it is loading."""
    dispatcher: Dispatcher
    config: SchedulingConfig = field(factory=SchedulingConfig)
    _facts: RunnerFacts | None = field(default=None, init=False)
    """Facts about the loaded model; ``None`` before a device has been ready."""

    @abstractmethod
    async def run(self) -> None:
        """Load or connect, then compute until cancelled; see the classes for errors. Cancellation: at once."""

    @property
    def takes_rows(self) -> bool:
        """Whether a device is ready to compute rows that arrive now."""
        return bool(self.dispatcher.devices)

    @property
    @abstractmethod
    def stall_reason(self) -> str:
        """Why no batches return; empty if they do."""

    @property
    def state(self) -> EngineState:
        """The state of all devices together."""
        if self.dispatcher.is_closed:
            return "dead"
        if not self.takes_rows:
            return "loading"
        return "stalled" if self.stall_reason else "ready"

    @property
    def facts(self) -> RunnerFacts:
        """Facts about the loaded model. Raises ``EngineLoadingError`` before a device has been ready."""
        if self._facts is None:
            raise EngineLoadingError(self.loading_message)
        return self._facts

    @property
    @abstractmethod
    def memory(self) -> ModelMemory:
        """The memory of the loaded model in all processes, including other machines."""

    @abstractmethod
    def statistics(self) -> QueueStatistics:
        """Return the state and the load, without admitted requests."""

    def free(self) -> None:  # noqa: B027  (the model is in other processes)
        """Release the loaded model, whose engine has ended."""

    def note_admitted(self) -> None:  # noqa: B027  (devices of this process are not shared)
        """Note that a request was admitted."""


@define(eq=False)
class Engine:
    """Computes the rows of one model: queues them, and devices compute batches from the queue.

    The devices are in this process or in others: the packages above do not know which.
    """

    queue: ModelQueue
    devices: Devices

    def __attrs_post_init__(self) -> None:
        self.queue.metrics.add_gauges(lambda: self.statistics().gauges())

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Load the model, then compute until cancelled; ``task_status.started`` is called before loading.

        Raises ``ModelLoadError`` if the model cannot be loaded and ``EngineDeadError`` if the engine cannot continue;
        all waiting rows have failed by then. Cancellation: waiting rows fail with ``EngineDeadError``, and a device
        call that is running is abandoned to its thread.
        """
        task_status.started()
        await self.devices.run()

    async def wait_ready(self) -> None:
        """Wait until the model is loaded. Raises ``EngineDeadError`` if the engine has stopped.

        Cancellation: at once.
        """
        await self.queue.dispatcher.wait_ready()

    @property
    def facts(self) -> RunnerFacts:
        """Facts about the loaded model. Raises ``EngineLoadingError`` before the engine has been ready."""
        return self.devices.facts

    @property
    def state(self) -> EngineState:
        """The state of the engine's devices."""
        return self.devices.state

    def statistics(self) -> QueueStatistics:
        """Return the engine's state and load, as far as this process knows them."""
        admission = self.queue.admission
        return evolve(self.devices.statistics(), admitted_tokens=admission.tokens, waiting_s=admission.waiting_s)

    async def submit(self, request: PoolingRequest) -> PoolingOutput:
        """Compute one row of no admitted request. Raises and is cancelled as ``submit_all``."""
        self.require_ready()
        (output,) = await self.submit_all([request])
        return output

    async def submit_all(
        self,
        requests: Sequence[PoolingRequest],
        rows_done: RowsDone | None = None,
        submit: Callable[..., object] | None = None,
    ) -> list[PoolingOutput]:
        """Compute rows; return them in the order of the requests.

        ``submit(*entries)``, by default ``submit_nowait``, submits them now or later. Raises ``EngineLoadingError``,
        ``EngineDeadError``, or the error of the first row that failed: ``BatchFailedError``, or the exception that
        ``rows_done`` raised. Then, and on cancellation, rows that are not launched leave the queue; launched rows are
        computed, and their outputs dropped.
        """
        submission = Submission(requests, rows_done)
        try:
            (submit or self.submit_nowait)(*submission.entries)
            return await submission.wait()
        finally:
            submission.rows_done = None  # launched rows may still be finished
            for entry in submission.entries:
                self.withdraw(entry)

    def submit_nowait(self, *entries: QueueEntry) -> None:
        """Queue rows; their entries are settled on the loop, maybe at once. Raises as ``submit_all`` without devices.

        Before the last device leaves, it computes rows of requests that were admitted while it was ready.
        """
        if not self.queue.dispatcher.devices:
            self.require_ready()
        self.queue.scheduler.put_nowait(*self.fail_refused(entries))

    def fail_refused(self, entries: Sequence[QueueEntry]) -> Sequence[QueueEntry]:
        """Fail rows that have no tokens or were refused for ending engine processes; return the others."""
        for entry in entries:
            if not len(entry.request.prompt.token_ids):
                entry.fail(BatchFailedError("An input contains no tokens."))
        return self.queue.dispatcher.lost.fail_refused([entry for entry in entries if entry.error is None])

    def withdraw(self, entry: QueueEntry) -> None:
        """Take a row out of the queue. A launched row is computed, and its output dropped.

        If its batch fails, it is not computed again.
        """
        entry.is_abandoned = True
        self.queue.scheduler.withdraw(entry)
        if entry.holder is not None:
            entry.holder.withdraw(entry)

    def admit(self, work: EstimatedWork) -> AdmittedRequest:
        """Admit a request until the end of the returned context; its rows may be submitted within.

        Raises ``EngineLoadingError``, ``EngineDeadError``, or ``OverloadedError`` if it would wait too long.
        """
        self.require_ready()
        admitted = self.queue.admission.admit(work)
        self.devices.note_admitted()  # once it is counted
        return admitted

    def refuse_late(self, work: EstimatedWork) -> None:
        """Raise the error that ``admit`` would raise, if any."""
        self.require_ready()
        self.queue.admission.refuse_late(work)

    def require_ready(self) -> None:
        """Raise ``EngineDeadError`` or ``EngineLoadingError`` unless a device takes rows."""
        if self.queue.dispatcher.is_closed:
            raise EngineDeadError(STOPPED)
        if not self.devices.takes_rows:
            raise EngineLoadingError(self.devices.loading_message)

    def __repr__(self) -> str:
        dispatcher = self.queue.dispatcher
        return f"<Engine {self.state}, {self.queue.scheduler!r}, {len(dispatcher.in_flight)} batches in flight>"
