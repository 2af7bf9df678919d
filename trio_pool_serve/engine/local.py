"""The engine whose model is computed in this process."""

from collections.abc import Callable

from attrs import define, evolve, field

from trio_pool_serve.config import SchedulingConfig
from trio_pool_serve.engine.device import DeviceFacts
from trio_pool_serve.engine.engine import Engine
from trio_pool_serve.engine.engine_statistics import EngineStatistics
from trio_pool_serve.engine.model_memory import ModelMemory
from trio_pool_serve.engine.worker import Worker
from trio_pool_serve.telemetry.metrics import EngineMetrics
from trio_pool_serve.threads.offload import Offload
from trio_pool_serve.types import Runner


@define(eq=False, repr=False)
class LocalEngine(Engine):
    """Computes rows on one runner, which ``load()`` returns; it is called in a thread.

    A batch is formed when it can be launched: batches grow with the load, and no row waits for more.
    """

    load: Callable[[], Runner]
    offload: Offload
    metrics: EngineMetrics
    config: SchedulingConfig = field(factory=SchedulingConfig)
    worker: Worker = field(init=False)

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        self.worker = Worker(self.load, self.offload, self.metrics, self.config, self.dispatcher)

    async def _compute(self) -> None:
        await self.worker.run()

    @property
    def facts(self) -> DeviceFacts:  # noqa: D102
        self.require_ready()
        return self.worker.facts

    @property
    def memory(self) -> ModelMemory:  # noqa: D102
        return self.worker.memory

    @property
    def stall_reason(self) -> str:  # noqa: D102
        return self.worker.stall_reason

    def statistics(self) -> EngineStatistics:  # noqa: D102
        admitted = self.admission
        return evolve(self.worker.statistics(), admitted_tokens=admitted.tokens, waiting_s=admitted.waiting_s)
