"""A model that computes in this process: its loading, memory and state."""

from collections.abc import Callable
from typing import ClassVar

import trio
from attrs import define, evolve, field

from trio_pool_serve.engine.device import InFlightBatch
from trio_pool_serve.engine.engine import Devices
from trio_pool_serve.engine.engine_statistics import EngineStatistics, ModelMemory
from trio_pool_serve.engine.local_device import LocalDevice
from trio_pool_serve.engine.queue_entry import Submission, require_finite
from trio_pool_serve.engine.stalled import stall_of_batches
from trio_pool_serve.errors import EngineDeadError, ModelLoadError, PoolServeError, innermost
from trio_pool_serve.telemetry.metrics import EngineMetrics
from trio_pool_serve.threads.offload import Offload
from trio_pool_serve.types import Prepare, Runner, RunnerParams


@define(eq=False, repr=False)
class Worker(Devices):
    """Computes the rows that its dispatcher takes on one runner, which ``load()`` loads in two steps, in a thread.

    A batch is formed when it can be launched: batches grow with the load, and no row waits for others to arrive.
    """

    is_local: ClassVar[bool] = True
    loading_message: ClassVar[str] = "The model is being loaded."
    load: Callable[[], Prepare] = field(kw_only=True)
    offload: Offload = field(kw_only=True)
    metrics: EngineMetrics = field(kw_only=True)
    device: LocalDevice | None = field(default=None, init=False)
    """``None`` while loading, and once the model was freed."""
    memory: ModelMemory = field(init=False, factory=ModelMemory)
    improved: trio.Event = field(init=False, factory=trio.Event)
    """Set once it computes as fast as it will, whether or not it was compiled."""

    def __attrs_post_init__(self) -> None:
        self.metrics.add_gauges(self.memory.gauges)

    async def run(self) -> None:
        """Load the model and compute a first row; then compute the batches that the dispatcher takes, until cancelled.

        Raises ``ModelLoadError`` if the model cannot be loaded or cannot compute, and ``EngineDeadError`` if no later
        batch can succeed; all waiting rows have failed by then. Cancellation: at once, all waiting rows fail; a call
        that loads or launches is abandoned to its thread.
        """
        try:
            device = self.device = await self._load()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(device.keep_returning_memory)
                nursery.start_soon(device.count_ticks)
                await self._compute_one(device)
                self._facts = evolve(device.facts, improvements=())  # which refer to the model even once it is freed
                for _ in range(device.most_launches):
                    nursery.start_soon(self.dispatcher.pull, nursery)
                self.dispatcher.add(device)
                if await device.improve():
                    self._facts = evolve(self._facts, computation=(*self._facts.computation, "compiled"))
                self.improved.set()
        except Exception as error:
            if isinstance(cause := innermost(error), ModelLoadError):
                raise cause from cause.__cause__
            raise EngineDeadError(f"The engine stopped: {type(cause).__name__}: {cause}") from cause
        finally:
            self.dispatcher.close()
            self.offload.close()

    @property
    def stall_reason(self) -> str:  # noqa: D102
        return stall_of_batches(self.dispatcher.oldest_in_flight_s, self.config.stall_timeout_s)

    def statistics(self) -> EngineStatistics:  # noqa: D102
        dispatcher, device = self.dispatcher, self.device
        statistics = EngineStatistics(
            state=self.state,
            queued_rows=len(dispatcher.source),
            queued_tokens=dispatcher.source.tokens,
            in_flight_batches=len(dispatcher.in_flight),
            oldest_in_flight_s=dispatcher.oldest_in_flight_s,
            memory_bytes=self.memory.resident_bytes,
        )
        if device is None:
            return statistics
        return evolve(
            statistics,
            tokens_per_s=device.tokens_per_s,
            batches=device.batches,
            failed_batches=device.failed_batches,
            batch_token_budget=device.budget.tokens,
        )

    def free(self) -> None:  # noqa: D102
        self.device = None

    async def _load(self) -> LocalDevice:
        prepare = await self.offload.run("load", self.memory.measured()(self.load))

        def prepared() -> Runner:
            runner = prepare(RunnerParams(self.config.wanted_batch_tokens))
            runner.return_memory()
            return runner

        # After the other models of the start, which have waited since this one began to load: the limiter is fair.
        runner = await self.offload.run("load", self.memory.measured()(prepared))
        self.offload.note_launch()
        return LocalDevice(runner, self.offload, self.metrics, self.config)

    async def _compute_one(self, device: LocalDevice) -> None:
        """Compute a row in the same way as later ones. Raises ``ModelLoadError`` if that fails."""
        if (request := device.facts.probe_request) is None:
            return
        submission = Submission([request], require_finite)
        batch = InFlightBatch([*submission.entries])
        await device.launch(batch)
        if (rows := await device.collect(batch)) is not None:
            await batch.deliver(rows)
        try:
            await submission.wait()
        except PoolServeError as error:
            raise ModelLoadError(f"The model was loaded, but cannot compute a batch: {error}") from error
