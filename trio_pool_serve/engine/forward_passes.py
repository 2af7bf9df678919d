"""Forward passes of a runner: launched in threads under a time limit, with what fails them told apart."""

import logging
import math
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial
from typing import Literal, TypeAlias, TypeVar

import trio
from attrs import define, field
from prometheus_client import Counter

from trio_pool_serve.engine.batch_recovery import Fault
from trio_pool_serve.engine.queue_entry import (
    SUBMITTERS_BETWEEN_CHECKPOINTS,
    QueueEntry,
    by_submitter,
    finish_together,
)
from trio_pool_serve.errors import OutOfDeviceMemoryError, RunnerDeadError
from trio_pool_serve.telemetry.metrics import EngineMetrics
from trio_pool_serve.threads.offload import Offload
from trio_pool_serve.types import Batch, PooledBatch, PooledValue, PoolingOutput, Runner

T = TypeVar("T")

logger = logging.getLogger(__name__)

RowValues: TypeAlias = list[tuple[PooledValue, ...]]


@define(eq=False)
class LaunchThread:
    """One of the threads that launch: a slot for each of its batches in flight, and when it last had one done.

    One for the ``background`` launches planned batches, which are computed at idle priority.
    """

    slots: trio.Semaphore
    kind: Literal["launch", "background"] = "launch"
    launching: trio.Lock = field(factory=trio.Lock)
    """Held for each launch: a batch that is computed again takes turns with new ones."""
    last_done: float = 0.0


@define(eq=False)
class InFlightBatch:
    """A batch that is launched and not settled, with the times of its last pass."""

    batch: Batch
    entries: Sequence[QueueEntry]
    is_background: bool = False
    """Whether it is computed at idle priority: for as long as others keep the cores busy, it does not come back."""
    launched: float = field(factory=time.perf_counter)
    forward_s: float = field(default=0.0, init=False)
    """Seconds that the launch took."""
    copy_s: float = field(default=0.0, init=False)
    """Seconds between the launch and the outputs."""

    def observe(self, metrics: EngineMetrics) -> None:
        """Observe the batch that is launched now."""
        batch = self.batch
        metrics.queue.observe_all([self.launched - entry.queued_at for entry in self.entries])
        metrics.batch_rows.observe(len(self.entries))
        metrics.batch_tokens.observe(batch.padded_tokens)
        metrics.tokens.inc(batch.tokens)
        metrics.padding_waste.observe(1 - batch.tokens / batch.padded_tokens)

    async def deliver(self, rows: RowValues) -> None:
        """Finish the entries with their outputs, those of one submitter together.

        Cancellation: between two slices; the entries that are left are not settled.
        """
        launched, forward_s, copy_s = self.launched, self.forward_s, self.copy_s
        outcomes = [
            (entry, PoolingOutput(values, launched - entry.queued_at, forward_s, copy_s))
            for entry, values in zip(self.entries, rows, strict=True)
        ]
        for index, together in enumerate(by_submitter(outcomes), start=1):
            finish_together(together)
            if self.is_background or index % SUBMITTERS_BETWEEN_CHECKPOINTS == 0:
                await trio.lowlevel.checkpoint()


@define(eq=False)
class InFlightBatches:
    """The batches of one engine that are in flight; ``busy`` counts the seconds in which there were any."""

    busy: Counter
    _batches: set[InFlightBatch] = field(init=False, factory=set)
    _counted_until: float = field(default=0.0, init=False)

    def add(self, in_flight: InFlightBatch) -> None:
        """Add a batch that is launched."""
        if not self._batches:
            self._counted_until = in_flight.launched
        self._batches.add(in_flight)

    def discard(self, in_flight: InFlightBatch) -> None:
        """Remove a batch that is settled. The time in which others were in flight too counts once."""
        now = time.perf_counter()
        self.busy.inc(now - self._counted_until)
        self._counted_until = now
        self._batches.discard(in_flight)

    def clear(self) -> None:
        """Remove all of them."""
        self._batches.clear()

    @property
    def oldest_s(self) -> float:
        """Seconds since the launch of the oldest batch that is not computed at idle priority; 0 without one."""
        now = time.perf_counter()
        return max((now - batch.launched for batch in self._batches if not batch.is_background), default=0.0)

    def __iter__(self) -> Iterator[InFlightBatch]:
        return iter(self._batches)

    def __len__(self) -> int:
        return len(self._batches)


@define(eq=False)
class ForwardPasses:
    """Launches batches on one runner and awaits their outputs.

    Both steps return a ``Fault`` if they fail, which drops the exception, and with it the tensors that its traceback
    refers to. They raise ``RunnerDeadError`` if no later batch can succeed, as after ``timeout_s``.
    """

    runner: Runner
    offload: Offload
    timeout_s: float

    async def launch(self, in_flight: InFlightBatch, thread: LaunchThread) -> PooledBatch | Fault | None:
        """Launch a batch; ``None`` if no client waits for any of its rows any more.

        Cancellation: at once; a launch that has begun is left to its thread.
        """

        def launch() -> PooledBatch | None:
            if all(entry.is_abandoned for entry in in_flight.entries):
                return None
            return self.runner.launch(in_flight.batch)

        lowers_priority = not self.runner.has_own_threads
        run = partial(self.offload.run, thread.kind, contain_exits(launch), lowers_priority=lowers_priority)
        async with thread.launching:
            handle = await self._attempt(run, in_flight)
        in_flight.forward_s = time.perf_counter() - in_flight.launched
        return handle

    async def collect(self, in_flight: InFlightBatch, handle: PooledBatch | Fault) -> RowValues | Fault:
        """Return the outputs of a batch, as far as it was launched. Cancellation: at once; the device goes on."""
        if isinstance(handle, Fault):
            return handle

        async def collect() -> RowValues:
            rows = await handle
            if len(rows) != len(in_flight.entries):
                raise ValueError(f"{len(rows)} answers to {len(in_flight.entries)} rows")
            return rows

        rows = await self._attempt(collect, in_flight)
        in_flight.copy_s = time.perf_counter() - in_flight.launched - in_flight.forward_s
        return rows

    async def _attempt(self, step: Callable[[], Awaitable[T]], in_flight: InFlightBatch) -> T | Fault:
        batch = in_flight.batch
        try:
            with trio.fail_after(math.inf if in_flight.is_background else self.timeout_s):
                return await step()
        except trio.TooSlowError as error:
            wedged = f"a batch has not come back for {self.timeout_s:g} s: the device is wedged"
            raise RunnerDeadError(wedged) from error
        except RunnerDeadError:
            raise
        except (OutOfDeviceMemoryError, MemoryError) as error:
            logger.warning(
                "out of memory: a batch of %d rows, %d tokens: %s", len(batch.requests), batch.padded_tokens, error
            )
            return Fault.OUT_OF_MEMORY
        except Exception:
            logger.exception("a batch of %d rows failed", len(batch.requests))
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
