"""Forward passes of a runner: launched in threads under a time limit, with what fails them told apart."""

import logging
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TypeAlias, TypeVar

import trio
from attrs import define, field

from trio_pool_serve.engine.batch_recovery import Fault
from trio_pool_serve.engine.queue import QueueEntry
from trio_pool_serve.errors import OutOfDeviceMemoryError, RunnerDeadError
from trio_pool_serve.threads.offload import Offload
from trio_pool_serve.types import Batch, PooledBatch, PooledValue, Runner

T = TypeVar("T")

logger = logging.getLogger(__name__)

RowValues: TypeAlias = list[tuple[PooledValue, ...]]


@define(eq=False)
class LaunchThread:
    """One of the threads that launch: a slot for each of its batches in flight, and when it last had one done."""

    slots: trio.Semaphore
    launching: trio.Lock = field(factory=trio.Lock)
    """Held for each launch: a batch that is computed again takes turns with new ones."""
    last_done: float = 0.0


@define(eq=False)
class InFlightBatch:
    """A batch that has been launched and is not settled, and when its last pass was launched."""

    batch: Batch
    entries: Sequence[QueueEntry]
    launched: float


@define(eq=False)
class ForwardPasses:
    """Launches batches on one runner and awaits their outputs.

    Both steps return a ``Fault`` if they fail, which drops the exception, and with it the tensors that its traceback
    refers to. They raise ``RunnerDeadError`` if no later batch can succeed, as after ``timeout_s``.
    """

    runner: Runner
    offload: Offload
    timeout_s: float

    async def launch(
        self, batch: Batch, entries: Sequence[QueueEntry], thread: LaunchThread
    ) -> PooledBatch | Fault | None:
        """Launch a batch; ``None`` if nobody waits for any of its rows any more.

        Cancellation: at once; a launch that has begun is left to its thread.
        """

        def launch() -> PooledBatch | None:
            if all(entry.is_abandoned for entry in entries):
                return None
            return self.runner.launch(batch)

        async with thread.launching:
            run = partial(
                self.offload.run,
                "launch",
                contain_exits(launch),
                lowers_priority=not self.runner.has_own_threads,
            )
            return await self._attempt(run, batch)

    async def collect(self, batch: Batch, handle: PooledBatch) -> RowValues | Fault:
        """Return the outputs of a launched batch. Cancellation: at once; the device goes on computing."""

        async def collect() -> RowValues:
            rows = await handle
            if len(rows) != len(batch.requests):
                raise ValueError(f"{len(rows)} answers to {len(batch.requests)} rows")
            return rows

        return await self._attempt(collect, batch)

    async def _attempt(self, step: Callable[[], Awaitable[T]], batch: Batch) -> T | Fault:
        try:
            with trio.fail_after(self.timeout_s):
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
