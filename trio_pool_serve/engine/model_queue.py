"""The rows of one model in one process: what was admitted, what waits, and what is given to devices."""

from attrs import define, field

from trio_pool_serve.engine.admission import Admission
from trio_pool_serve.engine.dispatcher import Dispatcher
from trio_pool_serve.engine.lost_rows import LostRows
from trio_pool_serve.engine.scheduler import Scheduler
from trio_pool_serve.engine.speed import ComputeRates
from trio_pool_serve.telemetry.metrics import EngineMetrics

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
        waits = self.metrics.queue
        self.scheduler = Scheduler(MAX_AGE * self.max_queue_s, self.rates)
        self.dispatcher = Dispatcher(
            self.scheduler,
            self.metrics.busy,
            lambda batch: waits.observe_all([batch.launched - entry.queued_at for entry in batch.entries]),
            self.zone,
            self.rates,
            LostRows(self.scheduler.put_nowait),
        )
        self.admission = Admission(self.max_queue_s, self.rates)
