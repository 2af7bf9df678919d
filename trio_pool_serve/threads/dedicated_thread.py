"""One OS thread for work that must always run on the same one.

Every OS thread that computes with torch gets an OpenMP team of its own. trio's threads come and go and are
shared with other work: forward passes that wander between them leave a team behind each, and the teams fight
for the cores.
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
    """Runs callables one after the other in a daemon thread, which starts with the first of them.

    A daemon: a device call that never returns must not keep the process from leaving.
    """

    name: str
    _jobs: queue.SimpleQueue[Callable[[], None] | None] = field(init=False, factory=queue.SimpleQueue)
    _thread: threading.Thread | None = field(default=None, init=False)

    async def run(self, blocking: Callable[[], T], *, limiter: trio.CapacityLimiter) -> T:
        """Return what ``blocking()`` returns, run in the thread once ``limiter`` has a token.

        Cancellation: at once. A callable that has been handed over runs to its end, and keeps its token until
        then.
        """
        job = object()  # the borrower: the token may outlive this task's interest in it
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
                return  # nobody is left to be told

        self._hand_over(work)
        await finished.wait()
        assert result is not None  # noqa: S101  (finish runs after work)
        return result.unwrap()

    def close(self) -> None:
        """Let the thread end when it has done what it was handed; the next ``run`` starts another."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread = None
            self._jobs = queue.SimpleQueue()

    def _hand_over(self, work: Callable[[], None]) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=_work_off, args=(self._jobs,), name=self.name, daemon=True)
            self._thread.start()
        self._jobs.put(work)

    def __repr__(self) -> str:
        return f"<DedicatedThread {self.name} {'running' if self._thread else 'not started'}>"


def _work_off(jobs: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    while (work := jobs.get()) is not None:
        work()
