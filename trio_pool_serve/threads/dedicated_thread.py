"""One OS thread for work that must always run on the same one.

Every OS thread that computes with torch gets its own OpenMP team. trio's threads come and go and are shared with other
work: forward passes that move between them leave a team behind in each, and the teams compete for the cores.
"""

import queue
import threading
from collections.abc import Callable
from typing import TypeVar

import outcome
import trio
from attrs import define, field

T = TypeVar("T")


@define(eq=False)
class DedicatedThread:
    """Runs callables one after the other in a daemon thread, which is started for the first of them.

    A daemon thread, because a device call that never returns must not keep the process from exiting.
    """

    name: str
    _jobs: queue.SimpleQueue[Callable[[], None] | None] = field(init=False, factory=queue.SimpleQueue)
    _thread: threading.Thread | None = field(default=None, init=False)

    async def run(self, blocking: Callable[[], T], *, limiter: trio.CapacityLimiter) -> T:
        """Return what ``blocking()`` returns, run in the thread once ``limiter`` has a token.

        Cancellation: at once. A callable that has been queued for the thread still runs, and holds its token until it
        has ended.
        """
        job = object()  # the borrower; not this task, which may end before the callable
        await limiter.acquire_on_behalf_of(job)
        finished = trio.Event()
        result: outcome.Outcome[T] | None = None
        loop = trio.lowlevel.current_trio_token()

        def finish() -> None:
            limiter.release_on_behalf_of(job)
            finished.set()

        def work() -> None:
            nonlocal result
            result = outcome.capture(blocking)
            try:
                loop.run_sync_soon(finish)
            except trio.RunFinishedError:
                return  # the loop has ended: no task waits

        self._enqueue(work)
        await finished.wait()
        assert result is not None  # noqa: S101  (finish runs after work)
        return result.unwrap()

    def close(self) -> None:
        """Let the thread end after its queued callables; the next ``run`` starts another thread."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread = None
            self._jobs = queue.SimpleQueue()

    def _enqueue(self, work: Callable[[], None]) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=_run_jobs, args=(self._jobs,), name=self.name, daemon=True)
            self._thread.start()
        self._jobs.put(work)

    def __repr__(self) -> str:
        return f"<DedicatedThread {self.name} {'running' if self._thread else 'not started'}>"


def _run_jobs(jobs: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    while (work := jobs.get()) is not None:
        work()
