"""The engine of one model: a queue of rows, a dispatcher, and the devices that pull batches."""

from collections.abc import Callable, Sequence

import trio
from attrs import define, evolve, field

from trio_pool_serve.engine.admission import Admission, AdmittedRequest, EstimatedWork
from trio_pool_serve.engine.dispatcher import STOPPED, Dispatcher
from trio_pool_serve.engine.engine_statistics import EngineState, QueueStatistics
from trio_pool_serve.engine.queue_entry import QueueEntry, RowsDone, Submission
from trio_pool_serve.engine.remote.remote_workers import RemoteWorkers
from trio_pool_serve.engine.remote.wire import DeviceFacts
from trio_pool_serve.engine.scheduler import Scheduler
from trio_pool_serve.engine.worker import Worker
from trio_pool_serve.errors import BatchFailedError, EngineDeadError, EngineLoadingError
from trio_pool_serve.types import PoolingOutput, PoolingRequest

MAX_AGE = 2.0
"""Times ``max_queue_s``: rows that have waited for longer open every second batch."""


@define(eq=False)
class Engine:
    """Computes the rows of one model: queues them, and a worker computes batches from the queue.

    The worker is in this process, or there are workers in others: the packages above do not know which.
    """

    worker: Worker | RemoteWorkers
    zone: str = ""
    scheduler: Scheduler = field(init=False)
    dispatcher: Dispatcher = field(init=False)
    admission: Admission = field(init=False)

    def __attrs_post_init__(self) -> None:
        worker, metrics, max_queue_s = self.worker, self.worker.metrics, self.worker.config.max_queue_s
        self.scheduler = Scheduler(MAX_AGE * max_queue_s, lambda rows: self.dispatcher.seconds_of(rows))
        self.dispatcher = Dispatcher(
            self.scheduler,
            metrics.busy,
            lambda batch: metrics.queue.observe_all([batch.launched - entry.queued_at for entry in batch.entries]),
            self.zone,
        )
        self.admission = Admission(max_queue_s, lambda: worker.shared(self.dispatcher.rates.seconds_per_token))
        worker.dispatcher = self.dispatcher
        if isinstance(worker, RemoteWorkers):  # device servers, which processes share, are told of what is admitted
            worker.queue, worker.admission = self.scheduler, self.admission
        metrics.add_gauges(lambda: self.statistics().gauges())

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Load the model, then compute until cancelled; ``task_status.started`` is called before loading.

        Raises ``ModelLoadError`` if the model cannot be loaded and ``EngineDeadError`` if the engine cannot continue;
        all waiting rows have failed by then. Cancellation: waiting rows fail with ``EngineDeadError``, and a device
        call that is running is abandoned to its thread.
        """
        task_status.started()
        await self.worker.run()

    async def wait_ready(self) -> None:
        """Wait until the model is loaded. Raises ``EngineDeadError`` if the engine has stopped.

        Cancellation: at once.
        """
        await self.dispatcher.wait_ready()

    @property
    def facts(self) -> DeviceFacts:
        """Facts about the loaded model. Raises as ``submit`` when not ready."""
        self.require_ready()
        return self.worker.facts

    @property
    def probe_request(self) -> PoolingRequest | None:
        """A row of a few tokens that the model can compute; ``None`` if none is known. Raises as ``facts``."""
        self.require_ready()
        return self.worker.probe_request

    @property
    def state(self) -> EngineState:
        """The engine's state."""
        return "dead" if self.dispatcher.is_closed else self.worker.state

    def statistics(self) -> QueueStatistics:
        """Return the engine's state and load, as far as this process knows them."""
        return evolve(
            self.worker.statistics(),
            state=self.state,
            admitted_tokens=self.admission.tokens,
            waiting_s=self.admission.waiting_s,
        )

    async def submit(self, request: PoolingRequest) -> PoolingOutput:
        """Compute one row. Raises and is cancelled as ``submit_all``."""
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
        """Queue rows; their entries are settled on the loop, maybe at once. Raises as ``submit_all`` when not ready."""
        self.require_ready()
        self.scheduler.put_nowait(*self.fail_refused(entries))

    def fail_refused(self, entries: Sequence[QueueEntry]) -> Sequence[QueueEntry]:
        """Fail rows that have no tokens or were refused for ending engine processes; return the others."""
        for entry in entries:
            if not entry.request.tokens:
                entry.fail(BatchFailedError("An input contains no tokens."))
        return self.dispatcher.refused.fail_equal([entry for entry in entries if not entry.is_settled])

    def withdraw(self, entry: QueueEntry) -> None:
        """Take a row out of the queue. A launched row is computed, and its output dropped.

        If its batch fails, it is not computed again.
        """
        entry.is_abandoned = True
        self.scheduler.withdraw(entry)
        if entry.holder is not None:
            entry.holder.withdraw(entry)

    def admit(self, work: EstimatedWork) -> AdmittedRequest:
        """Admit a request until the end of the returned context.

        Raises ``OverloadedError`` if it would wait too long, and as ``submit`` when not ready.
        """
        self.require_ready()
        self.worker.note_admitted()
        return self.admission.admit(work)

    def refuse_late(self, work: EstimatedWork) -> None:
        """Raise the error that ``admit`` would raise, if any."""
        self.require_ready()
        self.admission.refuse_late(work)

    def require_ready(self) -> None:
        """Raise ``EngineDeadError`` or ``EngineLoadingError`` unless a worker takes rows."""
        if self.dispatcher.is_closed:
            raise EngineDeadError(STOPPED)
        if not self.worker.takes_rows:
            raise EngineLoadingError(self.worker.loading_message)

    def __repr__(self) -> str:
        return f"<Engine {self.state}, {self.scheduler!r}, {len(self.dispatcher.in_flight)} batches in flight>"
