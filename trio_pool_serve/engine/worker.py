"""A runner and all that belongs to its device: loading, launch threads, budget, recovery and time limits."""

import logging
import math
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TypeVar

import trio
from attrs import define, field

from trio_pool_serve.config import SchedulingConfig
from trio_pool_serve.engine.batch_recovery import RETRY_S, BatchRecovery, Fault
from trio_pool_serve.engine.batching import BulkBudget, TokenBudget
from trio_pool_serve.engine.device import DeviceFacts
from trio_pool_serve.engine.dispatcher import Dispatcher
from trio_pool_serve.engine.engine_statistics import EngineState, EngineStatistics
from trio_pool_serve.engine.in_flight import InFlightBatch, RowValues
from trio_pool_serve.engine.launch_thread import LaunchThread
from trio_pool_serve.engine.model_memory import ModelMemory
from trio_pool_serve.engine.queue_entry import QueueEntry
from trio_pool_serve.engine.submission import Submission, require_finite
from trio_pool_serve.errors import (
    EngineDeadError,
    ModelLoadError,
    OutOfDeviceMemoryError,
    PoolServeError,
    RunnerDeadError,
    innermost,
)
from trio_pool_serve.processes.allocator import RETURN_EVERY_S, return_freed_memory
from trio_pool_serve.telemetry.metrics import EngineMetrics
from trio_pool_serve.threads.offload import Offload
from trio_pool_serve.types import PooledBatch, Runner

T = TypeVar("T")

logger = logging.getLogger(__name__)


@define(eq=False, repr=False)
class Worker:
    """Computes what ``dispatcher`` takes, on one runner, which ``load()`` returns; it is called in a thread.

    A batch that fails is computed again in parts here, so that nothing is sent anywhere for it. What fails drops its
    exception, and with it the tensors that the traceback refers to.
    """

    load: Callable[[], Runner]
    offload: Offload
    metrics: EngineMetrics
    config: SchedulingConfig
    dispatcher: Dispatcher
    return_freed_memory: Callable[[], None] = return_freed_memory
    """Called in the thread that launches, every ``RETURN_EVERY_S`` seconds in which there were batches."""
    runner: Runner | None = field(default=None, init=False)
    memory: ModelMemory = field(init=False, factory=ModelMemory)
    budget: TokenBudget = field(init=False, factory=lambda: TokenBudget(0))
    bulk: BulkBudget = field(init=False, factory=BulkBudget)
    batches: int = field(default=0, init=False)
    failed_batches: int = field(default=0, init=False)
    _launched: int = field(default=0, init=False)
    _state: EngineState = field(default="loading", init=False)
    _settled: trio.Event = field(init=False, factory=trio.Event)

    def __attrs_post_init__(self) -> None:
        self.metrics.add_gauges(self.memory.gauges)

    async def run(self) -> None:
        """Load the model and compute a first row; then compute what the dispatcher takes, until cancelled.

        Raises ``ModelLoadError`` if the model cannot be loaded or cannot compute, and ``EngineDeadError`` if no later
        batch can succeed; all waiting rows have failed by then. Cancellation: as then, at once; what loads or launches
        is abandoned to its thread.
        """
        try:
            threads = await self._load()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._keep_returning_memory)
                await self._compute_one(threads[0])
                self.dispatcher.devices = [*threads]
                for thread in threads:
                    nursery.start_soon(self.dispatcher.pull, [thread], nursery)
                self._state = "ready"
                self._settled.set()
        except Exception as error:
            if isinstance(cause := innermost(error), ModelLoadError):
                raise cause from cause.__cause__
            raise EngineDeadError(f"The engine stopped: {type(cause).__name__}: {cause}") from cause
        finally:
            self._state = "dead"
            self._settled.set()
            self.dispatcher.fail_all(EngineDeadError("The engine has stopped."))
            self.offload.close()

    async def wait_ready(self) -> None:
        """Wait until the model is loaded. Raises ``EngineDeadError`` if it cannot be. Cancellation: at once."""
        await self._settled.wait()
        if self._state == "dead":
            raise EngineDeadError("The engine has stopped.")

    @property
    def stall_reason(self) -> str:
        """Why no batches come back; empty if they do."""
        return self.dispatcher.in_flight.stall_reason(self.config.stall_timeout_s)

    @property
    def is_ready(self) -> bool:
        """Whether the model is loaded and batches are computed."""
        return self._state == "ready"

    @property
    def state(self) -> EngineState:
        """Its state."""
        return "stalled" if self._state == "ready" and self.stall_reason else self._state

    def statistics(self) -> EngineStatistics:
        """Return the state and the load, without what is admitted."""
        dispatcher = self.dispatcher
        return EngineStatistics(
            state=self.state,
            queued_rows=len(dispatcher.source),
            queued_tokens=dispatcher.source.tokens,
            in_flight_batches=len(dispatcher.in_flight),
            oldest_in_flight_s=dispatcher.in_flight.oldest_s,
            tokens_per_s=dispatcher.rates.tokens_per_s,
            batches=self.batches,
            failed_batches=self.failed_batches,
            batch_token_budget=self.budget.tokens,
        )

    async def _load(self) -> list[LaunchThread]:
        runner = self.runner = await self.offload.run("load", contain_exits(self.memory.measured()(self.load)))
        # Behind the other models of the start, which wait since this one began to be loaded: the limiter is fair.
        prepare = self.memory.measured()(lambda: runner.prepare(self.config.wanted_batch_tokens))
        self.budget = TokenBudget(await self.offload.run("load", contain_exits(prepare)))
        threads = [LaunchThread(self) for _ in range(runner.concurrent_launches)]
        return threads + [LaunchThread(self, "background") for _ in range(runner.background_launches)]

    async def _compute_one(self, thread: LaunchThread) -> None:
        """Compute a row as later ones are. Raises ``ModelLoadError`` if that fails."""
        if (request := self.loaded.probe_request) is None:
            return
        submission = Submission([request], require_finite)
        batch = InFlightBatch([*submission.entries])
        await thread.launch(batch)
        rows = await thread.collect(batch)
        if rows is not None:
            await batch.deliver(rows)
        try:
            await submission.wait()
        except PoolServeError as error:
            raise ModelLoadError(f"The model was loaded, but cannot compute a batch: {error}") from error

    @property
    def facts(self) -> DeviceFacts:
        """What is known of the loaded model."""
        runner = self.loaded
        sizes = runner.dimensions, runner.embeds_width, self.budget.max_tokens
        return DeviceFacts(*sizes, runner.cosine_with_float32, runner.probe_request)

    @property
    def loaded(self) -> Runner:
        """The runner, once the model is loaded."""
        assert self.runner is not None  # noqa: S101  (the caller knows that it is)
        return self.runner

    async def _keep_returning_memory(self) -> None:
        """Return what loading, and later batches, have freed: between two batches, so that none waits for the heap.

        Cancellation: at once.
        """
        returned = -1
        while True:
            await trio.sleep(RETURN_EVERY_S)
            if self._launched != returned:
                returned = self._launched
                await self._return_memory()

    async def _return_memory(self) -> None:
        lowers_priority = self.runner is None or not self.runner.has_own_threads
        await self.offload.run("launch", self.return_freed_memory, lowers_priority=lowers_priority)

    async def launch(self, batch: InFlightBatch, thread: LaunchThread) -> Fault | None:
        """Launch a batch, unless no client waits for any of its rows any more; return how that failed, if it did.

        Raises ``RunnerDeadError``. Cancellation: at once; a launch that has begun is left to its thread.
        """

        def launch() -> PooledBatch | None:
            if all(entry.is_abandoned for entry in batch.entries):
                return None
            return self.loaded.launch(batch.batch)

        self._launched += 1
        lowers_priority = not self.loaded.has_own_threads
        run = partial(self.offload.run, thread.kind, contain_exits(launch), lowers_priority=lowers_priority)
        async with thread.launching:
            handle = await self._attempt(run, batch)
        batch.forward_s = time.perf_counter() - batch.launched
        if isinstance(handle, Fault):
            return handle
        batch.handle = handle
        return None

    async def outputs(self, batch: InFlightBatch) -> RowValues | Fault:
        """Return the outputs of a launched batch, or how it failed. Raises ``RunnerDeadError``.

        Cancellation: at once; the device goes on.
        """

        async def collect() -> RowValues:
            assert batch.handle is not None  # noqa: S101  (it is launched)
            rows = await batch.handle
            if len(rows) != len(batch.entries):
                raise ValueError(f"{len(rows)} answers to {len(batch.entries)} rows")
            return rows

        rows = await self._attempt(collect, batch)
        batch.copy_s = time.perf_counter() - batch.launched - batch.forward_s
        if not isinstance(rows, Fault):
            self.batches += 1
        return rows

    async def recover(self, batch: InFlightBatch, fault: Fault, thread: LaunchThread) -> None:
        """Compute the rows of a batch that failed again, in parts, and settle them: see ``BatchRecovery``.

        Raises ``RunnerDeadError``. Cancellation: at once; rows that are not settled stay so.
        """

        async def compute(entries: list[QueueEntry]) -> Fault | None:
            part = InFlightBatch(entries, batch.is_planned)
            batch.launched = part.launched
            failed = await self.launch(part, thread)
            if failed is None and part.handle is None:
                return None
            rows = failed or await self.outputs(part)
            if isinstance(rows, Fault):
                await self._note_fault(part, rows)
                return rows
            await part.deliver(rows)
            return None

        self.failed_batches += 1
        await self._note_fault(batch, fault)
        recovery = BatchRecovery(compute, math.inf if batch.is_planned else RETRY_S)
        await recovery.run(batch.entries, fault)
        self.metrics.faults["failed_batches"].inc()
        self.metrics.faults["retries"].inc(recovery.passes)
        self.metrics.faults["failed_rows"].inc(recovery.failed_rows)

    async def _note_fault(self, batch: InFlightBatch, fault: Fault) -> None:
        if fault is not Fault.OUT_OF_MEMORY:
            return
        self.metrics.faults["out_of_memory"].inc()
        if len(batch.entries) > 1:
            self.budget.halve(self.budgeted_tokens(batch))
        await self._return_memory()

    def observe(self, batch: InFlightBatch) -> None:
        """Observe a batch that is launched now."""
        metrics, rows = self.metrics, batch.batch
        metrics.batch_rows.observe(len(batch.entries))
        metrics.batch_tokens.observe(rows.padded_tokens)
        metrics.tokens.inc(rows.tokens)
        metrics.padding_waste.observe(1 - rows.tokens / rows.padded_tokens)

    def note_done(self, batch: InFlightBatch) -> None:
        """Observe a batch that has succeeded."""
        self.budget.observe(self.budgeted_tokens(batch))
        self.metrics.forward.observe(batch.forward_s)
        self.metrics.copy_wait.observe(batch.copy_s)

    def budgeted_tokens(self, batch: InFlightBatch) -> int:
        """Return the tokens of a batch as its budget counts them."""
        return batch.batch.padded_tokens if self.loaded.pads else batch.batch.tokens

    async def _attempt(self, step: Callable[[], Awaitable[T]], batch: InFlightBatch) -> T | Fault:
        timeout_s, rows = self.config.batch_timeout_s, len(batch.entries)
        try:
            with trio.fail_after(math.inf if batch.is_planned else timeout_s):
                return await step()
        except trio.TooSlowError as error:
            wedged = f"a batch has not come back for {timeout_s:g} s: the device is wedged"
            raise RunnerDeadError(wedged) from error
        except RunnerDeadError:
            raise
        except (OutOfDeviceMemoryError, MemoryError) as error:
            logger.warning("out of memory: a batch of %d rows, %d tokens: %s", rows, batch.batch.padded_tokens, error)
            return Fault.OUT_OF_MEMORY
        except Exception:
            logger.exception("a batch of %d rows failed", rows)
            return Fault.RAISED


def contain_exits(blocking: Callable[[], T]) -> Callable[[], T]:
    """Wrap runner code: what is no ``Exception``, such as ``SystemExit``, is raised as ``RunnerDeadError``."""

    def run() -> T:
        try:
            return blocking()
        except Exception:
            raise
        except BaseException as error:
            raise RunnerDeadError(f"the runner raised {error!r}") from error

    return run
