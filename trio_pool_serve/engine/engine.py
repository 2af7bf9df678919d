"""The engine of one model: a queue of rows, a dispatcher, and the devices that pull batches."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import trio
from attrs import asdict, define, field

from trio_pool_serve.config import SchedulingConfig
from trio_pool_serve.engine.admission import Admission, AdmittedRequest, EstimatedWork
from trio_pool_serve.engine.compute_rates import SecondsPerToken
from trio_pool_serve.engine.device import DeviceFacts
from trio_pool_serve.engine.dispatcher import Dispatcher
from trio_pool_serve.engine.engine_statistics import EngineState, QueueStatistics
from trio_pool_serve.engine.model_memory import ModelMemory
from trio_pool_serve.engine.queue_entry import QueueEntry
from trio_pool_serve.engine.scheduler import Scheduler
from trio_pool_serve.engine.submission import RowDone, Submission
from trio_pool_serve.errors import BatchFailedError, EngineDeadError, EngineLoadingError
from trio_pool_serve.telemetry.metrics import EngineMetrics
from trio_pool_serve.types import PoolingOutput, PoolingRequest

MAX_AGE = 2.0
"""Times ``max_queue_s``: rows that have waited for longer open every second batch."""


@define(eq=False)
class Engine(ABC):
    """Computes the rows of one model, on devices of this process or of others: the packages above do not know which."""

    metrics: EngineMetrics = field(kw_only=True)
    config: SchedulingConfig = field(kw_only=True)
    loading_message: ClassVar[str] = "The model is being loaded."
    scheduler: Scheduler = field(init=False)
    dispatcher: Dispatcher = field(init=False)
    admission: Admission = field(init=False)
    is_dead: bool = field(default=False, init=False)

    def __attrs_post_init__(self) -> None:
        self.scheduler = Scheduler(MAX_AGE * self.config.max_queue_s, lambda rows: self.dispatcher.seconds_of(rows))
        self.dispatcher = Dispatcher(self.scheduler, self.metrics.busy, self.metrics.queue)
        self.admission = Admission(self.config.max_queue_s, lambda: self.seconds_per_token)
        self.metrics.add_gauges(lambda: self.statistics().gauges())

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Load the model, then compute until cancelled; ``task_status.started`` is called before loading.

        Raises ``ModelLoadError`` if the model cannot be loaded and ``EngineDeadError`` if the engine cannot go on; all
        waiting rows have failed by then. Cancellation: waiting rows fail with ``EngineDeadError``, and a device call
        that is running is abandoned to its thread.
        """
        task_status.started()
        try:
            await self._compute()
        finally:
            self.is_dead = True
            self.dispatcher.fail_all(EngineDeadError("The engine has stopped."))
            self.dispatcher.note_room()  # for those that wait until it is ready

    @abstractmethod
    async def _compute(self) -> None:
        """Compute on this engine's own devices, until cancelled."""

    @property
    @abstractmethod
    def facts(self) -> DeviceFacts:
        """What is known of the loaded model. Raises as ``submit`` when not ready."""

    @property
    @abstractmethod
    def memory(self) -> ModelMemory:
        """The memory of the loaded model, in all processes that compute it."""

    @property
    @abstractmethod
    def stall_reason(self) -> str:
        """Why the engine's state is stalled; empty if it is not."""

    @property
    def takes_rows(self) -> bool:
        """Whether a device is ready to compute rows."""
        return bool(self.dispatcher.devices)

    async def wait_ready(self) -> None:
        """Wait until the model is loaded. Raises ``EngineDeadError`` if the engine has stopped.

        Cancellation: at once.
        """
        await trio.lowlevel.checkpoint()
        while not self.dispatcher.devices and not self.is_dead:
            await self.dispatcher.room.park()
        if self.is_dead:
            raise EngineDeadError("The engine has stopped.")

    def statistics(self) -> QueueStatistics:
        """Return the engine's state and load, as far as they are known in this process."""
        queue, admission = self.scheduler, self.admission
        return QueueStatistics(self.state, len(queue), queue.tokens, admission.tokens, admission.waiting_s)

    @property
    def reported_load(self) -> dict[str, Any]:
        """The engine's part of ``/load``: what no other process of the server reports of it."""
        return asdict(self.statistics())

    async def submit(self, request: PoolingRequest) -> PoolingOutput:
        """Compute one row. Raises and is cancelled as ``submit_all``."""
        (output,) = await self.submit_all([request])
        return output

    async def submit_all(
        self, requests: Sequence[PoolingRequest], row_done: RowDone | None = None
    ) -> list[PoolingOutput]:
        """Compute rows; return them in the order of the requests.

        Raises ``EngineLoadingError``, ``EngineDeadError``, or the error of the first row that failed:
        ``BatchFailedError``, or what ``row_done`` raised. Then, and on cancellation, rows that have not been launched
        leave the queue; those that have are computed, and their outputs dropped.
        """
        return await self.complete(Submission(requests, row_done), self.submit_nowait)

    async def complete(self, submission: Submission, submit: Callable[..., object]) -> list[PoolingOutput]:
        """Call ``submit(*entries)``, which submits the entries now or later, and return their outputs.

        Raises and is cancelled as ``submit_all``.
        """
        try:
            submit(*submission.entries)
            return await submission.wait()
        finally:
            submission.row_done = None  # launched rows may still be finished
            for entry in submission.entries:
                self.withdraw(entry)

    def submit_nowait(self, *entries: QueueEntry) -> None:
        """Queue rows; their entries are settled on the loop, maybe at once. Raises as ``submit_all`` when not ready."""
        self.require_ready()
        self.scheduler.put_nowait(*self.fail_refused(entries))

    def fail_refused(self, entries: Sequence[QueueEntry]) -> Sequence[QueueEntry]:
        """Fail rows that have no tokens or were refused for ending engine processes; return the others."""
        if empty := [entry for entry in entries if not entry.request.tokens]:
            for entry in empty:
                entry.fail(BatchFailedError("An input has no tokens."))
            entries = [entry for entry in entries if not entry.is_settled]
        return self.dispatcher.refuse_known(entries)

    def withdraw(self, entry: QueueEntry) -> None:
        """Take a row out of the queue; one that has been launched is computed, and its output dropped.

        Should its batch fail, it is not computed again.
        """
        entry.is_abandoned = True
        self.scheduler.withdraw(entry)
        if entry.holder is not None:
            entry.holder.withdraw(entry)

    def admit(self, work: EstimatedWork) -> AbstractContextManager[AdmittedRequest]:
        """Admit a request for as long as the context lasts.

        Raises ``OverloadedError`` if it would wait for too long, and as ``submit`` when not ready.
        """
        self.require_ready()
        return self.admission.admit(work)

    def refuse_late(self, work: EstimatedWork) -> None:
        """Raise what ``admit`` would raise."""
        self.require_ready()
        self.admission.refuse_late(work)

    def is_overloaded(self, waited_s: float = 0.0) -> bool:
        """Return whether so much waits that a further request, which has waited already, would probably be refused."""
        return self.admission.is_full(waited_s)

    def is_refusing(self, waited_s: float = 0.0) -> bool:
        """Return whether a further request may be refused, which has waited already."""
        return self.admission.is_refusing(waited_s)

    def require_ready(self) -> None:
        """Raise ``EngineDeadError`` or ``EngineLoadingError`` unless a device takes rows."""
        if self.is_dead:
            raise EngineDeadError("The engine has stopped.")
        if not self.takes_rows:
            raise EngineLoadingError(self.loading_message)

    @property
    def state(self) -> EngineState:
        """The engine's state."""
        if self.is_dead:
            return "dead"
        if not self.takes_rows:
            return "loading"
        return "stalled" if self.stall_reason else "ready"

    @property
    def seconds_per_token(self) -> SecondsPerToken:
        """The measured rates of all devices together, by work class."""
        return self.dispatcher.rates.seconds_per_token

    def __repr__(self) -> str:
        in_flight = len(self.dispatcher.in_flight)
        return f"<{type(self).__name__} {self.state}, {self.scheduler!r}, {in_flight} batches in flight>"
