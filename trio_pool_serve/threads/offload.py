"""Blocking callables on named capacity limiters.

Everything that would hold up the event loop goes through ``Offload.run``: one thread hop, about 75 µs,
under a limiter of its own kind. Kinds never share a limiter, so a finished answer does not wait behind
somebody else's tokenising.
"""

import time
from collections.abc import Callable
from typing import Literal, TypeAlias, TypeVar, get_args

import trio
from attrs import define, field, frozen

from trio_pool_serve.threads.dedicated_thread import DedicatedThread
from trio_pool_serve.threads.priority import lower_priority

T = TypeVar("T")

Kind: TypeAlias = Literal["render", "media", "postprocess", "launch", "copy"]
"""render: prompts to token ids, and decoding large bodies. media: bytes to what an image processor makes of them.
postprocess: outputs to bytes.
launch: model loading and forward passes. copy: waiting for copies from the device."""


@frozen
class LimiterStatistics:
    """What one limiter is doing."""

    capacity: int
    borrowed: int
    waiting: int


def _ignore(kind: Kind, wait_s: float, run_s: float) -> None:
    """Do not observe hops."""


@define(eq=False)
class Offload:
    """Runs blocking callables in threads, under one ``trio.CapacityLimiter`` per kind.

    ``observe(kind, wait_s, run_s)`` is called on the loop after each finished hop: seconds waited for a
    thread, and seconds the callable ran. Threads get at least ``niceness``, for good: processor time goes to the loop
    first. ``in_threads=False`` runs everything on the loop instead: the benchmarks and the responsiveness test use it
    to show what the threads are for.
    """

    render: int = 1
    media: int = 1
    postprocess: int = 1
    launch: int = 1
    copy: int = 2
    niceness: int | None = None
    observe: Callable[[Kind, float, float], None] = _ignore
    in_threads: bool = True
    _limiters: dict[Kind, trio.CapacityLimiter] = field(init=False)
    _launch_thread: DedicatedThread = field(init=False, factory=lambda: DedicatedThread("launch"))

    def __attrs_post_init__(self) -> None:
        self._limiters = {kind: trio.CapacityLimiter(getattr(self, kind)) for kind in get_args(Kind)}

    async def run(self, kind: Kind, blocking: Callable[[], T], *, abandon_on_cancel: bool = False) -> T:
        """Return what ``blocking()`` returns, run in a thread once the ``kind`` limiter has room.

        ``launch`` is always the same thread, until ``close``.

        Cancellation: while waiting for room, at once. While the thread runs, only after it has finished,
        unless ``abandon_on_cancel`` — then at once, and the thread keeps its token until it ends; ``launch``
        is always abandoned.
        """
        asked = time.perf_counter()
        started = finished = asked

        def timed() -> T:
            nonlocal started, finished
            if self.in_threads:
                lower_priority(self.niceness)
            started = time.perf_counter()
            try:
                return blocking()
            finally:
                finished = time.perf_counter()

        try:
            if self.in_threads and kind == "launch":
                return await self._launch_thread.run(timed, limiter=self._limiters[kind])
            if self.in_threads:
                return await trio.to_thread.run_sync(
                    timed, limiter=self._limiters[kind], abandon_on_cancel=abandon_on_cancel
                )
            await trio.lowlevel.checkpoint()
            return timed()
        finally:
            if finished > asked:
                self.observe(kind, started - asked, finished - started)

    def close(self) -> None:
        """Let the ``launch`` thread end; whoever launches again gets a new one."""
        self._launch_thread.close()

    def statistics(self) -> dict[Kind, LimiterStatistics]:
        """Return what each limiter is doing now."""
        return {
            kind: LimiterStatistics(
                capacity=int(stats.total_tokens), borrowed=stats.borrowed_tokens, waiting=stats.tasks_waiting
            )
            for kind, stats in ((kind, limiter.statistics()) for kind, limiter in self._limiters.items())
        }

    def __repr__(self) -> str:
        busy = ", ".join(
            f"{kind} {stats.borrowed}/{stats.capacity}+{stats.waiting}" for kind, stats in self.statistics().items()
        )
        return f"<Offload {busy}>"
