"""Worker processes for blocking callables: each has its own interpreter lock and can be killed."""

import logging
import math
import multiprocessing
import signal
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar, TypeVarTuple

import outcome
import trio
import trio_parallel
from attrs import Factory, define, field, frozen

from trio_pool_serve.errors import (
    PoolServeError,
    StartFailedError,
    UnavailableError,
    WorkerDiedError,
    WorkerTooSlowError,
)
from trio_pool_serve.threads.client_turns import ClientTurns, LimiterStatistics
from trio_pool_serve.threads.offload import lower_priority

logger = logging.getLogger(__name__)

T = TypeVar("T")
Args = TypeVarTuple("Args")

CLOSING_S = 2.0
"""Idle workers exit as soon as their pipes close; one that has not exited after this many seconds is killed."""


@frozen
class WorkerStatistics(LimiterStatistics):
    """The state of ``WorkerProcesses``; ``killed`` counts, since the start, calls that exceeded their time limit."""

    killed: int


def _begin(niceness: int | None, prepare: Callable[[], object]) -> None:
    """Prepare a worker process.

    It ignores SIGTERM and exits when its pipe closes: a drain waits for its work, and service managers send the signal
    to all processes of a group.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    lower_priority(niceness)
    prepare()


@define(eq=False)
class _Work:
    """One call: the borrower of its limiter token, and its result."""

    result: outcome.Outcome[Any] = field(
        factory=lambda: outcome.Error(UnavailableError("The server is shutting down.")), init=False
    )
    done: trio.Event = field(factory=trio.Event, init=False)


@define(eq=False)
class WorkerProcesses:
    """At most ``workers`` processes, started on demand and kept while ``run`` runs.

    Each first calls ``prepare()``, at ``niceness``, outside of any call's time limit. Callables, arguments, results and
    exceptions are pickled on the loop: pass bytes and other large flat objects, not large trees.
    ``in_processes=False`` runs everything on the loop instead, without time limits, for benchmarks.
    """

    workers: int
    prepare: Callable[[], object] = bool  # does nothing
    in_processes: bool = True
    niceness: int | None = None
    _limiter: trio.CapacityLimiter = field(
        init=False, default=Factory(lambda self: trio.CapacityLimiter(self.workers), takes_self=True)
    )
    _turns: ClientTurns = field(
        init=False, default=Factory(lambda self: ClientTurns(self.workers + 1, self.workers + 1), takes_self=True)
    )
    """One more than processes: it is ready when a process is."""
    _context: trio_parallel.WorkerContext | None = field(init=False, default=None)
    _nursery: trio.Nursery | None = field(init=False, default=None)
    _killed: int = field(init=False, default=0)
    _running: int = field(init=False, default=0)
    """Calls of the context's ``run_sync``, including calls that no process has begun yet."""

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Run worker processes until cancelled.

        Cancellation: busy processes are killed, and their callers get ``UnavailableError``.
        """
        # hypercorn's workers are daemonic. ``multiprocessing`` forbids them children, because they may be killed before
        # they end these; but ours exit by themselves when their pipes close. There is no public setting for it.
        multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # noqa: SLF001
        # Spawned, which takes 0.2 s, and not by multiprocessing's fork server: it imports from the working directory,
        # never removes its directory if ``os._exit`` ends the process, and it would inherit the signal mask and the
        # modules of a whole program that embeds the service.
        try:
            async with (
                trio_parallel.open_worker_context(
                    idle_timeout=math.inf, init=partial(_begin, self.niceness, self.prepare), grace_period=CLOSING_S
                ) as self._context,
                trio.open_nursery() as self._nursery,
            ):
                task_status.started()
                try:
                    await trio.sleep_forever()
                finally:
                    self._nursery = None  # from now on ``call`` raises ``UnavailableError``
        except trio_parallel.BrokenWorkerError as error:
            logger.warning("a worker process did not exit by itself: %s", error)
        finally:
            self._context = self._nursery = None

    async def call(
        self, function: Callable[[*Args], T], *args: *Args, client: int = 0, timeout_s: float = math.inf
    ) -> T:
        """Return ``function(*args)``, called in a worker process in the turn of ``client``, or raise its error.

        After ``timeout_s`` seconds the process is killed and ``WorkerTooSlowError`` raised. Raises ``WorkerDiedError``
        if the process dies by itself, and ``UnavailableError`` unless ``run`` runs.

        Cancellation: at once; a process that already works is busy until it is done or its time limit has passed.
        """
        if not self.in_processes:
            await trio.lowlevel.checkpoint()
            return function(*args)
        work = _Work()
        if self._nursery is None:
            raise UnavailableError("The worker processes are not running.")
        async with self._turns.turn(client):
            await self._limiter.acquire_on_behalf_of(work)
            if self._nursery is None:
                self._limiter.release_on_behalf_of(work)
                raise UnavailableError("The server is shutting down.")
            self._nursery.start_soon(self._work, work, function, args, timeout_s)
            await work.done.wait()
        result: T = work.result.unwrap()
        return result

    async def start_first(self) -> None:
        """Start a process if there is none, so that the first call finds one. A failure is logged: calls try again.

        Cancellation: at once; the process is started all the same.
        """
        stats = None if self._context is None else self._context.statistics()
        if stats is None or stats.idle_workers or stats.running_workers:
            return
        try:
            await self.call(bool)
        except PoolServeError as error:
            logger.warning("a worker process could not be started ahead: %s", error)

    def statistics(self) -> WorkerStatistics:
        """Return the current state."""
        stats = self._limiter.statistics()
        return WorkerStatistics(
            self.workers, stats.borrowed_tokens, stats.tasks_waiting + self._turns.waiting, self._killed
        )

    async def _work(self, work: _Work, function: Callable[..., Any], args: tuple[Any, ...], timeout_s: float) -> None:
        try:
            try:
                while self._idle_processes() <= 0:
                    await self._run(bool)
            except OSError as error:
                raise StartFailedError("The server cannot start another process now.") from error
            with trio.move_on_after(timeout_s) as limit:
                work.result = outcome.Value(await self._run(function, *args))
            if limit.cancelled_caught:
                self._killed += 1
                work.result = outcome.Error(WorkerTooSlowError(f"The work took longer than {timeout_s:g} s."))
        except trio_parallel.BrokenWorkerError as error:
            work.result = outcome.Error(WorkerDiedError("The worker process died.", exit_code=error.args[-1].exitcode))
        except Exception as error:
            work.result = outcome.Error(error)
        finally:
            work.done.set()
            self._limiter.release_on_behalf_of(work)

    def _idle_processes(self) -> int:
        """Return the number of processes without a call, begun or about to begin."""
        assert self._context is not None  # noqa: S101  (it outlives the nursery)
        stats = self._context.statistics()
        return int(stats.idle_workers - (self._running - stats.running_workers))

    async def _run(self, function: Callable[..., Any], *args: Any) -> Any:
        assert self._context is not None  # noqa: S101  (it outlives the nursery)
        self._running += 1
        try:
            # ``_limiter`` limits the calls already: this one limits nothing.
            return await self._context.run_sync(function, *args, kill_on_cancel=True, limiter=trio.CapacityLimiter(1))
        finally:
            self._running -= 1

    def __repr__(self) -> str:
        stats = self.statistics()
        return f"<WorkerProcesses {stats}, {stats.killed} killed>"
