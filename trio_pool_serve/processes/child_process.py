"""Processes that belong to this one: they are told what to do over a socket, and leave when that is closed.

However their parent ends, the socket ends with it, and so do they: none is left behind, not even by SIGKILL. They
ignore SIGTERM and SIGINT, which a terminal or systemd sends to all processes of a server at once: to drain is the
parent's business, and it needs them for that.
"""

import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any, Generic, NoReturn, TypeVar

import trio
from attrs import define

from trio_pool_serve.errors import ModelLoadError
from trio_pool_serve.processes.framed_stream import FramedStream
from trio_pool_serve.processes.restart_backoff import RestartBackoff

logger = logging.getLogger(__name__)

Status = TypeVar("Status")
Job = TypeVar("Job")

RESTART_PAUSES_S = (0.0, 1.0, 2.0, 5.0, 15.0, 30.0)

STABLE_AFTER_S = 60.0

BACKLOG = 128

EXIT_TIMEOUT_S = 5.0
"""Seconds that a child which is not wanted any more has to leave by itself."""


@define(eq=False)
class ChildProcess(Generic[Status]):
    """One child. What it says are messages of type ``Status``."""

    process: trio.Process
    channel: FramedStream[Status]

    async def status(self) -> Status | None:
        """Return what the child says next; ``None`` once it has ended, as one does that says what is no message.

        Cancellation: at once, and a child that is about to end is killed.
        """
        received = await self.channel.receive()
        if received is None:
            await self.leave(EXIT_TIMEOUT_S)
            return None
        return received[0]

    async def wait(self) -> str:
        """Wait for its end; return in words how it was. Cancellation: at once."""
        code = await self.process.wait()
        return f"ended by signal {-code}" if code < 0 else f"left with status {code}"

    async def leave(self, timeout_s: float) -> None:
        """Tell it to leave, and kill it if it has not after that many seconds. Cancellation: it is killed."""
        try:
            await trio.aclose_forcefully(self.channel.stream)
            with trio.move_on_after(timeout_s):
                await self.process.wait()
        finally:
            if self.process.returncode is None:
                self.process.kill()
                with trio.CancelScope(shield=True), trio.move_on_after(EXIT_TIMEOUT_S):
                    await self.process.wait()


@asynccontextmanager
async def open_child(
    module: str, job: object, status: Any, *, fds: Sequence[int] = ()
) -> AsyncIterator[ChildProcess[Any]]:
    """Run ``python -m MODULE`` with ``job`` for as long as the block lasts; it inherits ``fds``.

    Cancellation: the child is killed unless it leaves within ``EXIT_TIMEOUT_S``.
    """
    ours, theirs = socket.socketpair()
    with theirs:
        process = await trio.lowlevel.open_process(
            [sys.executable, "-m", module, str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno(), *fds],
        )
    child = ChildProcess[Any](process, FramedStream(trio.SocketStream(trio.socket.from_stdlib_socket(ours)), status))
    try:
        with suppress(trio.BrokenResourceError):  # it has ended already, as will be seen
            await child.channel.send(job)
        yield child
    finally:
        with trio.CancelScope(shield=True), trio.move_on_after(2 * EXIT_TIMEOUT_S):
            await child.leave(EXIT_TIMEOUT_S)


@contextmanager
def listening_at(path: Path) -> Iterator[socket.socket]:
    """Give a socket that listens at ``path``, which is removed in the end.

    Raises ``ModelLoadError`` where there can be none: a path may have 108 characters on Linux, for one.
    """
    with socket.socket(socket.AF_UNIX) as listening:
        try:
            listening.bind(str(path))
        except OSError as error:
            raise ModelLoadError(f"The processes of the server cannot meet at {path}: {error}") from error
        listening.listen(BACKLOG)
        listening.setblocking(False)  # noqa: FBT003  (the standard library's own signature)
        try:
            yield listening
        finally:
            path.unlink(missing_ok=True)


async def keep_alive(name: str, live: Callable[[], Awaitable[str]]) -> NoReturn:
    """Run ``live()``, the life of one child, again and again; it returns in words how that ended.

    Raises what ``live`` raises. Cancellation: at once.
    """
    backoff = RestartBackoff(RESTART_PAUSES_S, STABLE_AFTER_S)
    while True:
        began = trio.current_time()
        end = await live()
        pause_s = backoff.next_pause_s(trio.current_time() - began)
        logger.error("the process of %s has %s; the next one starts in %g s", name, end, pause_s)
        await trio.sleep(pause_s)


def run_as_child(main: Callable[[FramedStream[Job], Job], Awaitable[int]], job_type: Any) -> None:
    """Be a child: run ``main(channel, job)`` and leave with the status that it returns, whatever threads still do."""
    for ignored in (signal.SIGINT, signal.SIGTERM):
        signal.signal(ignored, signal.SIG_IGN)
    os._exit(trio.run(_run, main, job_type))


async def _run(main: Callable[[FramedStream[Job], Job], Awaitable[int]], job_type: Any) -> int:
    parent = socket.socket(fileno=int(sys.argv[1]))
    channel = FramedStream[Job](trio.SocketStream(trio.socket.from_stdlib_socket(parent)), job_type)
    received = await channel.receive()
    return 0 if received is None else await main(channel, received[0])


async def send_to_parent(channel: FramedStream[Job], status: object) -> None:
    """Say something to the parent, if it is still there. Cancellation: at once; nothing can be said after that."""
    with suppress(trio.BrokenResourceError):
        await channel.send(status)


async def wait_for_parent(channel: FramedStream[Job]) -> None:
    """Wait until the parent is gone, or wants this process to be. Cancellation: at once."""
    while await channel.receive() is not None:
        """Nothing is said after the job."""
