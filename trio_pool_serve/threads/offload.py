"""Blocking callables in threads, under named capacity limiters.

All work that would block the event loop goes through ``Offload.run``: one thread hop, about 75 µs, under a named
limiter. Each kind of work has its own limiter, so a finished output does not wait for another request's
tokenisation.

Worker threads are nicer than the event loop, and OpenMP threads spin briefly. Answering ``/health`` takes microseconds,
a forward pass milliseconds. Otherwise, on a machine without an idle core, the loop would wait for its fair share beside
the threads whose work it started.
"""

import logging
import os
import sys
import time
from collections.abc import Callable
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Literal, TypeAlias, TypeVar, get_args

import outcome
import trio
from attrs import Factory, define, field

from trio_pool_serve.errors import PoolServeError, RunnerDeadError, StartFailedError, forget_frames
from trio_pool_serve.threads.client_turns import Backlog, ClientTurns, LimiterStatistics
from trio_pool_serve.threads.dedicated_threads import DedicatedThreads

T = TypeVar("T")

logger = logging.getLogger(__name__)

LimiterName: TypeAlias = Literal[
    "render", "media", "cluster", "postprocess", "download", "load", "compile", "launch", "ahead", "background", "copy",
    "files",
]  # fmt: skip
"""render: prompts to token ids, and decoding large bodies. media: image bytes to the image processor's arrays.
cluster: token pooling. postprocess: outputs to bytes. download: models from the hub, while the server runs. load:
loading models, one at a time. compile: compiling models that are loaded. launch: forward passes. ahead: the next
forward pass. background: forward passes of planned batches at idle priority. copy: waiting for copies from the device.
files: reading and writing files of bulk work."""

CAPACITIES: dict[LimiterName, int] = {"ahead": 1, "cluster": 1, "compile": 1, "download": 4, "load": 1, "files": 2}
"""Capacities that are not set. A download that hangs does not hold up the others. Two imports or conversions at a time
are no faster, and take the memory of both; so do two clusterings, which hold the interpreter lock most of the time. One
file is read while another is written."""

OF_RUNNERS = {"load", "compile", "launch", "ahead", "background"}
"""Kinds of work that call runners. Their errors other than ``Exception``, such as ``SystemExit``, become
``RunnerDeadError``."""

START_PAUSE_S = 1.0
"""Pause between attempts to start a thread for work that belongs to no request."""


RELOAD_S = 10.0
"""Maximum seconds for reading the files of a setting again: a file system may not respond."""

NICENESS = 10
"""Niceness of computing threads and processes relative to the event loop, which then does not wait for them."""


def relative_niceness(by: int = NICENESS) -> int | None:
    """Return the calling thread's niceness plus ``by``; ``None`` to leave threads unchanged.

    ``None`` except on Linux, which alone has a niceness per thread.
    """
    return os.nice(0) + by if sys.platform == "linux" and by else None


def lower_priority(niceness: int | None) -> None:
    """Raise the calling thread's niceness to at least ``niceness``; threads that it starts later inherit it."""
    if niceness is not None and os.getpriority(os.PRIO_PROCESS, 0) < niceness:
        os.setpriority(os.PRIO_PROCESS, 0, niceness)


SPIN_ROUNDS = 10_000
"""Rounds that a thread spins before it sleeps: as fast between kernels as libgomp's default of 300,000, which keeps a
core busy after a forward pass, when the event loop and the clients need it, and while a thread waits for another one
that has lost its core."""


def limit_openmp_spinning() -> None:
    """Make libgomp's threads sleep early, unless the environment configures it. Call before torch is imported."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", str(SPIN_ROUNDS))


@define(eq=False)
class Offload:
    """Runs blocking callables in threads, under one ``trio.CapacityLimiter`` per ``LimiterName``.

    ``observe(kind, wait_s, run_s)`` is called on the loop after each finished hop, with the seconds waited for a thread
    and the seconds that the callable ran. Threads get at least ``niceness``, permanently: the event loop gets CPU time
    first. ``in_threads=False`` runs everything on the loop instead, as the baseline of benchmarks and of the
    responsiveness test.
    """

    render: int = 1
    media: int = 2
    """One image is prepared while another one arrives."""
    postprocess: int = 1
    launch: int = 1
    copy: int = 2
    idle_launches: int = field(default=0, kw_only=True)
    """Planned batches computed at idle priority at a time; 0 if none may be."""
    cores_shared_by: int = field(default=Factory(lambda self: self.launch, takes_self=True), kw_only=True)
    """Launch threads on these cores, the server's other processes included."""
    may_launch_more: bool = field(default=False, kw_only=True)
    """Whether ``launch`` is a default, which the first model's trial may replace."""
    niceness: int | None = None
    observe: Callable[[LimiterName, float, float], None] = lambda *_: None
    in_threads: bool = True
    is_serving: bool = field(default=False, init=False)
    """Whether requests may be computed while a model is loaded: measurements mean little then."""
    undecoded: Backlog = field(init=False, factory=Backlog)
    """Bodies that ``decode`` has not decoded yet."""
    _rendering: ClientTurns = field(
        init=False, default=Factory(lambda self: ClientTurns(self.render + 1, self.render + 1), takes_self=True)
    )
    """One more than threads: it is ready when a thread is."""
    _decoding: ClientTurns = field(
        init=False, default=Factory(lambda self: ClientTurns(sys.maxsize, self.render + 1), takes_self=True)
    )
    """Turns for entering ``_rendering``: a client's prompts do not wait for all of its bodies."""
    preparing: ClientTurns = field(
        init=False, default=Factory(lambda self: ClientTurns(self.media, self.media), takes_self=True)
    )
    """Turns for preparing one image."""
    _limiters: dict[LimiterName, trio.CapacityLimiter] = field(init=False)
    _reloading: dict[str, trio.CapacityLimiter] = field(init=False, factory=dict)
    _launch_threads: DedicatedThreads = field(init=False, factory=lambda: DedicatedThreads("launch"))

    def __attrs_post_init__(self) -> None:
        capacities = CAPACITIES | {
            "render": self.render,
            "media": self.media + 1,  # short work does not wait for an image
            "postprocess": self.postprocess,
            "launch": self.launch,
            "background": max(1, self.idle_launches),
            "copy": self.copy,
        }
        self._limiters = {kind: trio.CapacityLimiter(capacities[kind]) for kind in get_args(LimiterName)}

    async def run(
        self,
        kind: LimiterName,
        blocking: Callable[[], T],
        *,
        client: int = 0,
        abandon_on_cancel: bool = False,
        lowers_priority: bool = True,
    ) -> T:
        """Return what ``blocking()`` returns, run in a thread once the limiter ``kind`` has a token.

        ``render`` waits for the turn of the client with number ``client``. ``launch``, ``ahead`` and ``background``
        always use the same threads, until ``close``. Without ``lowers_priority`` the thread keeps its priority: for
        callables that compute in threads of their own, and hold the interpreter lock themselves.

        Raises what ``blocking`` raises; for ``OF_RUNNERS``, ``RunnerDeadError`` instead of a ``BaseException`` that is
        not an ``Exception``.

        If no thread can be started, ``render``, ``media`` and ``postprocess`` raise ``StartFailedError``; others wait.

        Cancellation: at once while waiting for turn and token. While the thread runs, only after it has finished; with
        ``abandon_on_cancel``, and always for ``OF_RUNNERS``, at once, and the thread holds its token until it ends.
        """
        called = time.perf_counter()
        started = finished = called

        def timed() -> outcome.Outcome[T]:
            nonlocal started, finished
            if self.in_threads and lowers_priority:
                lower_priority(self.niceness)
            started = time.perf_counter()
            result = outcome.capture(blocking)
            finished = time.perf_counter()
            if kind in OF_RUNNERS and isinstance(result, outcome.Error) and not isinstance(result.error, Exception):
                result = outcome.Error(RunnerDeadError(f"the runner raised {result.error!r}"))
            if isinstance(result, outcome.Error) and isinstance(result.error, PoolServeError):
                forget_frames(result.error)  # the thread's frames refer to the result
            return result

        try:
            while True:
                try:
                    async with self._rendering.turn(client) if kind == "render" else nullcontext():
                        return (await self._run_in_thread(kind, timed, abandon_on_cancel=abandon_on_cancel)).unwrap()
                except RuntimeError as error:
                    if started > called:  # raised by the callable
                        raise
                    if kind in ("render", "media", "postprocess"):
                        raise StartFailedError("The server cannot start another thread now.") from error
                    logger.warning("no thread for %s: %s; the next attempt is in %g s", kind, error, START_PAUSE_S)
                await trio.sleep(START_PAUSE_S)
        finally:
            if finished > called:
                self.observe(kind, started - called, finished - started)

    async def _run_in_thread(self, kind: LimiterName, timed: Callable[[], T], *, abandon_on_cancel: bool) -> T:
        limiter = self._limiters[kind]
        if not self.in_threads:
            await trio.lowlevel.checkpoint()
            return timed()
        if kind in ("launch", "ahead", "background"):
            return await self._launch_threads.run(timed, limiter=limiter)
        if kind not in ("load", "compile"):
            return await trio.to_thread.run_sync(timed, limiter=limiter, abandon_on_cancel=abandon_on_cancel)
        with closing(DedicatedThreads(kind)) as loading:  # with a new thread, torch's threads for it end
            return await loading.run(timed, limiter=limiter)

    async def in_turn(self, client: int, blocking: Callable[[], T]) -> T:
        """Return what ``blocking()`` returns, run under ``render`` in a client's turn.

        Cancellation: at once; a thread that works keeps its limiter token until it finishes.
        """
        return await self.run("render", blocking, client=client, abandon_on_cancel=True)

    async def decode(self, client: int, blocking: Callable[[], T]) -> T:
        """Decode a body: return what ``blocking()`` returns, run under ``render`` in a client's turn.

        Cancellation: as ``run``.
        """
        self.undecoded.add(client)
        try:
            async with self._decoding.turn(client):
                decoded = await self.run("render", blocking, client=client)
        except BaseException:
            self.undecoded.withdraw(client)
            raise
        self.undecoded.note_done(client)
        return decoded

    async def reload(self, what: str, read: Callable[[], T], *paths: Path) -> T | None:
        """Return what ``read()`` returns, which reloads the files ``paths`` of a setting.

        Return ``None`` if it fails, if one of them is no regular file, or if it takes longer than ``RELOAD_S``: that is
        logged, and the old ones are kept. It waits only for an earlier ``read`` of the same files, which may never end.
        Cancellation: at once; the old ones are kept.
        """

        def read_regular() -> T:
            for path in paths:
                if path.exists() and not path.is_file():
                    raise OSError(f"{path} is not a regular file.")  # reading a pipe may never end
            return read()

        try:
            with trio.fail_after(RELOAD_S):
                found = await trio.to_thread.run_sync(
                    read_regular,
                    abandon_on_cancel=True,
                    limiter=self._reloading.setdefault(what, trio.CapacityLimiter(1)),
                )
        except (OSError, ValueError, trio.TooSlowError) as error:
            logger.error(  # noqa: TRY400  (the message is complete)
                "reloading the %s failed; the previous ones stay in use: %s",
                what,
                str(error) or f"they could not be read within {RELOAD_S:g} s.",
            )
            return None
        logger.info("reloaded the %s", what)
        return found

    def note_launch(self) -> None:
        """Apply the present value of ``launch`` to its limiter."""
        self._limiters["launch"].total_tokens = self.launch

    def close(self) -> None:
        """End the launch threads; the next launch starts a new one."""
        self._launch_threads.close()

    def waiting(self, kind: LimiterName) -> int:
        """Return the number of tasks that wait for a thread of this kind."""
        return self._limiters[kind].statistics().tasks_waiting

    def statistics(self) -> dict[LimiterName, LimiterStatistics]:
        """Return the use of each limiter; tasks that wait for their client's turn count as waiting."""
        turns = {"render": self._rendering.waiting + self._decoding.waiting, "media": self.preparing.waiting}
        return {
            kind: LimiterStatistics(
                capacity=int(stats.total_tokens),
                borrowed=stats.borrowed_tokens,
                waiting=stats.tasks_waiting + turns.get(kind, 0),
            )
            for kind, stats in ((kind, limiter.statistics()) for kind, limiter in self._limiters.items())
        }

    def __repr__(self) -> str:
        busy = ", ".join(f"{kind} {stats}" for kind, stats in self.statistics().items())
        return f"<Offload {busy}>"
