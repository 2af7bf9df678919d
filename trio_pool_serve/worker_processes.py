"""Blocking callables in processes of their own, which have an interpreter lock of their own and can be killed."""

import logging
import math
from collections.abc import Callable
from typing import Any, TypeVar, TypeVarTuple

import outcome
import trio
import trio_parallel
from attrs import define, field, frozen

from trio_pool_serve.errors import UnavailableError, WorkerDiedError, WorkerTooSlowError

logger = logging.getLogger(__name__)

T = TypeVar("T")
Args = TypeVarTuple("Args")

CLOSING_S = 2.0
"""Idle workers leave as soon as their pipes close; whichever has not by then is killed."""


@frozen
class WorkerStatistics:
    """What a pool of processes is doing."""

    capacity: int
    borrowed: int
    waiting: int
    killed: int
    """Since the beginning, for being too slow."""


@define(eq=False)
class _Work:
    """One call: the name its place is borrowed in, and what became of it."""

    result: outcome.Outcome[Any] = field(
        factory=lambda: outcome.Error(UnavailableError("The server is shutting down.")), init=False
    )
    done: trio.Event = field(factory=trio.Event, init=False)


@define(eq=False)
class WorkerProcesses:
    """At most ``workers`` processes, started when there is work for them, kept while ``run`` runs.

    ``prepare()`` is called first in each, and its time is nobody's. Callables, arguments, results and exceptions
    travel by pickle, which is made and read on the loop: send bytes and other large flat things, no large trees.
    ``in_processes=False`` runs everything on the loop instead, without time limits: the benchmarks use it to show
    what the processes are for.
    """

    workers: int
    prepare: Callable[[], object] = bool
    in_processes: bool = True
    _limiter: trio.CapacityLimiter = field(init=False)
    _context: trio_parallel.WorkerContext | None = field(init=False, default=None)
    _nursery: trio.Nursery | None = field(init=False, default=None)
    _killed: int = field(init=False, default=0)

    def __attrs_post_init__(self) -> None:
        self._limiter = trio.CapacityLimiter(self.workers)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Have processes until cancelled.

        Cancellation: processes that work are killed, and whoever waits for them is told that the server shuts down.
        """
        try:
            async with (
                trio_parallel.open_worker_context(
                    idle_timeout=math.inf, init=self.prepare, grace_period=CLOSING_S
                ) as self._context,
                trio.open_nursery() as self._nursery,
            ):
                task_status.started()
                await trio.sleep_forever()
        except trio_parallel.BrokenWorkerError as error:
            logger.warning("a worker process did not leave by itself: %s", error)
        finally:
            self._context = self._nursery = None

    async def call(self, function: Callable[[*Args], T], *args: *Args, timeout_s: float = math.inf) -> T:
        """Return what ``function(*args)`` returns in a process, or raise what it raises.

        Raises ``WorkerTooSlowError`` once it has run for ``timeout_s`` seconds, when its process is killed;
        ``WorkerDiedError`` if that dies by itself; ``UnavailableError`` unless ``run`` runs.

        Cancellation: at once; a process that already works keeps its place until it is done or killed for its time
        limit, as a thread would that cannot be stopped.
        """
        if not self.in_processes:
            await trio.lowlevel.checkpoint()
            return function(*args)
        if self._nursery is None:
            raise UnavailableError("The worker processes are not running.")
        work = _Work()
        await self._limiter.acquire_on_behalf_of(work)
        if self._nursery is None:
            self._limiter.release_on_behalf_of(work)
            raise UnavailableError("The server is shutting down.")
        self._nursery.start_soon(self._work, work, function, args, timeout_s)
        await work.done.wait()
        result: T = work.result.unwrap()
        return result

    def statistics(self) -> WorkerStatistics:
        """Return what the processes are doing now."""
        stats = self._limiter.statistics()
        return WorkerStatistics(self.workers, stats.borrowed_tokens, stats.tasks_waiting, self._killed)

    async def _work(self, work: _Work, function: Callable[..., Any], args: tuple[Any, ...], timeout_s: float) -> None:
        context = self._context
        assert context is not None  # noqa: S101  (it outlives the nursery)
        unlimited = trio.CapacityLimiter(1)  # the place is borrowed already
        try:
            if not context.statistics().idle_workers:
                await context.run_sync(bool, kill_on_cancel=True, limiter=unlimited)
            with trio.move_on_after(timeout_s) as limit:
                value = await context.run_sync(function, *args, kill_on_cancel=True, limiter=unlimited)
                work.result = outcome.Value(value)
            if limit.cancelled_caught:
                self._killed += 1
                work.result = outcome.Error(WorkerTooSlowError(f"The work took longer than {timeout_s:g} s."))
        except trio_parallel.BrokenWorkerError:
            work.result = outcome.Error(WorkerDiedError("The process that did the work has died."))
        except Exception as error:
            work.result = outcome.Error(error)
        finally:
            self._limiter.release_on_behalf_of(work)
            work.done.set()

    def __repr__(self) -> str:
        stats = self.statistics()
        return f"<WorkerProcesses {stats.borrowed}/{stats.capacity}+{stats.waiting}, {stats.killed} killed>"
