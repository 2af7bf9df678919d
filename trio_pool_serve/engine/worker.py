"""A runner with its loading, memory, launch threads, token budget and state."""

from collections.abc import Callable
from functools import cached_property
from typing import ClassVar, Literal, TypeVar

import trio
from attrs import define, field

from trio_pool_serve.config import SchedulingConfig
from trio_pool_serve.engine.batching import ShortBatchBudget, TokenBudget
from trio_pool_serve.engine.compute_rates import SecondsPerToken
from trio_pool_serve.engine.device import DeviceFacts, InFlightBatch
from trio_pool_serve.engine.dispatcher import BatchSource, Dispatcher
from trio_pool_serve.engine.engine_statistics import EngineState, EngineStatistics, ModelMemory
from trio_pool_serve.engine.launch_thread import LaunchThread, ThreadKind
from trio_pool_serve.engine.queue_entry import Submission, require_finite
from trio_pool_serve.errors import EngineDeadError, ModelLoadError, PoolServeError, RunnerDeadError, innermost
from trio_pool_serve.processes.allocator import RETURN_EVERY_S, return_freed_memory
from trio_pool_serve.telemetry.metrics import EngineMetrics
from trio_pool_serve.threads.offload import Offload
from trio_pool_serve.types import ComputedBy, Runner

T = TypeVar("T")


@define(eq=False, repr=False)
class Worker:
    """Computes the rows of ``queue`` on one runner, which ``load()`` returns; it is called in a thread.

    A batch is formed when it can be launched: batches grow with the load, and no row waits for others to arrive.
    """

    loading_message: ClassVar[str] = "The model is being loaded."
    load: Callable[[], Runner]
    offload: Offload
    metrics: EngineMetrics
    config: SchedulingConfig = field(factory=SchedulingConfig)
    queue: BatchSource = field(init=False)
    """Set, like ``dispatcher``, by the engine or device server that this computes for."""
    dispatcher: Dispatcher = field(init=False)
    runner: Runner | None = field(default=None, init=False)
    computed_by: ComputedBy = field(default=ComputedBy(), init=False)
    memory: ModelMemory = field(init=False, factory=ModelMemory)
    budget: TokenBudget = field(init=False, factory=lambda: TokenBudget(0))
    short_batch: ShortBatchBudget = field(init=False, factory=ShortBatchBudget)
    batches: int = field(default=0, init=False)
    failed_batches: int = field(default=0, init=False)

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

    async def wait_ready(self) -> None:
        """Wait until the model is loaded. Raises ``EngineDeadError`` if it cannot be. Cancellation: at once."""
        await self.dispatcher.wait_ready()

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
            queued_rows=len(self.queue),
            queued_tokens=self.queue.tokens,
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

    @cached_property  # read several times for each request
    def facts(self) -> DeviceFacts:
        """Facts about the loaded model."""
        runner = self.loaded
        sizes = runner.dimensions, runner.embeds_width, self.budget.max_tokens
        return DeviceFacts(*sizes, runner.cosine_with_float32, runner.probe_request)

    async def _load(self) -> list[LaunchThread]:
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

    async def _compute_one(self, thread: LaunchThread) -> None:
        """Compute a row in the same way as later ones. Raises ``ModelLoadError`` if that fails."""
        if (request := self.loaded.probe_request) is None:
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

        lowers_priority = kind == "load" or not self.loaded.has_own_threads
        return await self.offload.run(kind, contained, lowers_priority=lowers_priority)

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
