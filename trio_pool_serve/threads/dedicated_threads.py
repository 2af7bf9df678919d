"""OS threads for work that must not move between threads.

OpenMP gives each OS thread that computes a team of worker threads and buffers of its own. trio's threads come and go
and are shared with other work: forward passes that move between them leave a team in each, and the teams compete
for the cores.
"""

import os
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import TypeAlias, TypeVar

import outcome
import trio
from attrs import define, field

T = TypeVar("T")

Jobs: TypeAlias = queue.SimpleQueue[Callable[[], None] | None]
"""The callables that a thread runs in order; ``None`` ends it."""

HAS_IDLE_PRIORITY = hasattr(os, "SCHED_IDLE")
"""Whether threads can have idle priority: on Linux."""


@define(eq=False)
class DedicatedThreads:
    """Runs callables in daemon threads: in the thread that became idle last, or in a new one if all are busy.

    Daemon threads, because a device call that never returns must not keep the process from exiting.
    """

    name: str
    _idle: list[Jobs] = field(init=False, factory=list)

    async def run(self, blocking: Callable[[], T], *, limiter: trio.CapacityLimiter) -> T:
        """Return what ``blocking()`` returns, run in a thread once ``limiter`` has a token.

        Cancellation: at once. A callable that has been handed to a thread still runs, and holds its token until it
        ends.
        """
        job = object()  # the borrower; not this task, which may end before the callable
        await acquire(limiter, job)
        finished = trio.Event()
        result: outcome.Outcome[T] | None = None
        loop = trio.lowlevel.current_trio_token()
        idle = self._idle
        try:
            jobs = idle.pop() if idle else start_thread(self.name)
        except RuntimeError:
            limiter.release_on_behalf_of(job)
            raise

        def finish() -> None:
            limiter.release_on_behalf_of(job)
            if idle is self._idle:
                idle.append(jobs)
            else:
                jobs.put(None)  # closed meanwhile
            finished.set()

        def work() -> None:
            nonlocal result
            result = outcome.capture(blocking)
            try:
                loop.run_sync_soon(finish)
            except trio.RunFinishedError:
                jobs.put(None)  # the loop has ended: no task waits, and none follows

        jobs.put(work)
        await finished.wait()
        assert result is not None  # noqa: S101  (finish runs after work)
        return result.unwrap()

    def close(self) -> None:
        """End all threads, busy ones after their callable; the next ``run`` starts a new one."""
        idle, self._idle = self._idle, []
        for jobs in idle:
            jobs.put(None)

    def __repr__(self) -> str:
        return f"<DedicatedThreads {self.name} {len(self._idle)} idle>"


async def acquire(limiter: trio.CapacityLimiter, borrower: object) -> None:
    """Acquire a token for ``borrower``; at once if there is one, without a turn of the event loop.

    Cancellation: at once, without a token.
    """
    await trio.lowlevel.checkpoint_if_cancelled()
    try:
        limiter.acquire_on_behalf_of_nowait(borrower)
    except trio.WouldBlock:
        await limiter.acquire_on_behalf_of(borrower)


def start_thread(name: str) -> Jobs:
    """Start a daemon thread that runs the callables put into the returned queue in order, until ``None`` ends it."""
    jobs: Jobs = queue.SimpleQueue()
    threading.Thread(target=_run_jobs, args=(jobs,), name=name, daemon=True).start()
    return jobs


def _run_jobs(jobs: Jobs) -> None:
    while (work := jobs.get()) is not None:
        work()
        del work  # or an idle thread would keep the objects of its last callable


def at_idle_priority(blocking: Callable[[], T]) -> T:
    """Return what ``blocking()`` returns, run in a new thread at idle priority; raise what it raises.

    The thread, and threads that it starts, get a core only when no other thread wants it (SCHED_IDLE). They keep the
    caller's priority if the system does not allow idle priority, or has none.
    """
    done: Future[outcome.Outcome[T]] = Future()

    def run() -> None:
        if HAS_IDLE_PRIORITY:
            with suppress(PermissionError):
                os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        done.set_result(outcome.capture(blocking))

    # A thread of its own: without CAP_SYS_NICE, a thread cannot leave idle priority.
    # A daemon: it must not keep the process from exiting.
    threading.Thread(target=run, name="idle", daemon=True).start()
    return done.result().unwrap()
