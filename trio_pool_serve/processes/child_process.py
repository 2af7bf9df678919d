"""Child processes: each gets its job over a socket to its parent, and exits when that socket closes.

However the parent ends, by SIGKILL for example, the socket closes and no child outlives it. Children ignore SIGTERM
and SIGINT, which a terminal or systemd sends to all processes of a server at once: the parent needs them to drain.
"""

import io
import logging
import math
import multiprocessing
import os
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any, Generic, NoReturn, TypeVar

import msgspec
import trio
from attrs import define, field, frozen

from trio_pool_serve.errors import EngineDeadError, ModelLoadError, unwrap_exception_groups
from trio_pool_serve.processes.framed_stream import MAX_HEADER_BYTES, PREFIX, FramedStream, sendable
from trio_pool_serve.processes.standard_error import StandardError

logger = logging.getLogger(__name__)

Status = TypeVar("Status")

TICKS = 6
"""A timeout of silence is divided into this many ticks, which the waiting event loop counts: if its own process is
stopped, or its loop is late, only one tick passes, however long that takes."""

EXIT_TIMEOUT_S = 5.0
"""Seconds that a child has to exit by itself after its channel is closed, before it is killed."""

LAST_MESSAGE_S = 1.0
"""Seconds in which messages are received that a child has sent before it ended."""

RUN_MODULE = (
    "import runpy, sys; sys.path[:] = sys.argv[3:]; runpy.run_module(sys.argv[2], run_name='__main__', alter_sys=True)"
)


OPTIONS: Mapping[str, Any] = {"stdin": subprocess.DEVNULL, "process_group": 0}
"""A child is not in the terminal's process group: Ctrl-C would print a traceback of a child that is still starting."""


def _command_of(module: str, channel: socket.socket) -> list[str]:
    """Return the command that runs a module with its end of the channel to this process.

    The module imports from where this process imports, plugins included. ``python -m`` would import from the current
    folder first, which may be a model's folder with files of strangers.
    """
    return [sys.executable, "-P", "-c", RUN_MODULE, str(channel.fileno()), module, *sys.path]


def _end_of(code: int | None) -> str:
    if code is None:
        return "cannot be killed now"  # it is stuck in the kernel
    return f"was ended by signal {-code}" if code < 0 else f"exited with status {code}"


@define
class RestartBackoff:
    """The pauses before restarts: ``pauses_s`` in order (seconds), then the last one repeated.

    They start over after a run of more than ``stable_after_s`` seconds. The defaults suit child processes.
    """

    pauses_s: Sequence[float] = (0.0, 1.0, 2.0, 5.0, 15.0, 30.0)
    stable_after_s: float = 60.0
    crashes_in_a_row: int = field(default=0, init=False)

    def next_pause_s(self, ran_s: float) -> float:
        """Return the seconds to wait after a crash that ended a run of ``ran_s`` seconds."""
        if ran_s > self.stable_after_s:
            self.crashes_in_a_row = 0
        pause_s = self.pauses_s[min(self.crashes_in_a_row, len(self.pauses_s) - 1)]
        self.crashes_in_a_row += 1
        return pause_s


@define(eq=False)
class ChildProcess(Generic[Status]):
    """One child process, which sends messages of type ``Status``."""

    process: trio.Process
    channel: FramedStream[Status]

    async def status(self, silence_s: float = math.inf) -> Status | None:
        """Return the child's next message; ``None`` once it has ended. An invalid message ends the child.

        If there is none for ``silence_s``, the child is killed. Cancellation: at once, and a child that is about to end
        is killed.
        """
        for _ in range(TICKS):
            # A tick may cut off a frame that is being received: the next one continues it, as small frames are kept
            # until they are whole. Children send no large ones.
            with trio.move_on_after(silence_s / TICKS):
                if (received := await self._receive()) is not None:
                    return received[0]
                break  # the child has ended, or sent an invalid message: it exits, or is killed
        else:
            logger.error("process %d is killed: it has been silent for %g s", self.process.pid, silence_s)
            self.process.kill()
        await self.leave(EXIT_TIMEOUT_S)
        return None

    async def _receive(self) -> tuple[Status, memoryview] | None:
        received = None
        async with trio.open_nursery() as nursery:

            async def end_with_process() -> None:
                await self.process.wait()
                # The channel may remain open in processes that the child forked.
                nursery.cancel_scope.deadline = trio.current_time() + LAST_MESSAGE_S

            nursery.start_soon(end_with_process)
            received = await self.channel.receive()
            nursery.cancel_scope.cancel(reason="a message was received, or the channel has ended")
        return received

    @property
    def end(self) -> str:
        """How the child has ended, as a phrase for the log."""
        return _end_of(self.process.returncode)

    async def leave(self, timeout_s: float) -> None:
        """Close the channel, and kill the child if it has not exited in time. Cancellation: it is killed."""
        try:
            # The end of the channel tells the child to exit; without waiting, as it may not read at all.
            await trio.aclose_forcefully(self.channel.stream)
            with trio.move_on_after(timeout_s):
                await self.process.wait()
        finally:
            if self.process.returncode is None:
                self.process.kill()
                # Shielded, so that the caller is not cancelled before the child's memory and devices are free. Limited,
                # as a process that is stuck in a driver does not end.
                with trio.CancelScope(shield=True), trio.move_on_after(EXIT_TIMEOUT_S):
                    await self.process.wait()


@define(eq=False)
class BlockingChild(Generic[Status]):
    """One child process for threads without an event loop; it sends messages of type ``Status``, without payloads.

    Its standard output is discarded: this process's own may carry a table. Raises ``OSError`` on construction if no
    process can start.
    """

    module: str
    decoder: msgspec.msgpack.Decoder[Status]
    process: "subprocess.Popen[bytes]" = field(init=False)
    channel: socket.socket = field(init=False)
    _received: io.BufferedReader = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.channel, theirs = socket.socketpair()
        self._received = self.channel.makefile("rb")
        with theirs:  # the child alone has this end, which therefore closes when it dies
            command, passed = _command_of(self.module, theirs), [theirs.fileno()]
            self.process = subprocess.Popen(command, pass_fds=passed, stdout=subprocess.DEVNULL, **OPTIONS)  # noqa: S603

    def send(self, message: object) -> None:
        """Send a message, unless the child has ended: ``status`` will return ``None``."""
        header = msgspec.msgpack.encode(message)
        with suppress(OSError):  # it has ended, or this end has been closed by ``leave``
            self.channel.sendall(PREFIX.pack(len(header), 0) + header)

    def status(self) -> Status | None:
        """Return the child's next message, as ``ChildProcess.status``. Blocks."""
        with suppress(ConnectionError, struct.error, msgspec.DecodeError):  # within a message, it is shorter
            size, _ = PREFIX.unpack(self._received.read(PREFIX.size))
            if size <= MAX_HEADER_BYTES:
                return self.decoder.decode(self._received.read(size))
        self.leave(EXIT_TIMEOUT_S)
        return None

    @property
    def end(self) -> str:
        """How the child has ended, as a phrase for the log."""
        return _end_of(self.process.returncode)

    def leave(self, timeout_s: float) -> None:
        """Close the channel, and kill the child if it has not exited in time."""
        self._received.close()
        self.channel.close()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout_s)
        self.process.kill()  # does nothing to a process that has ended
        self.process.wait()


@asynccontextmanager
async def open_child(
    module: str,
    job: object,
    status: Any,
    *,
    fds: Sequence[int] = (),
    environment: Mapping[str, str] = MappingProxyType({}),
) -> AsyncIterator[ChildProcess[Any]]:
    """Run a module, as ``python -m MODULE`` does, with ``job`` for as long as the block lasts.

    The child inherits ``fds`` and this process's environment, with the variables in ``environment`` added. Retries as
    long as the system cannot start a process.

    Cancellation: the child is killed unless it leaves within ``EXIT_TIMEOUT_S``.
    """
    process, ours = await _start(module, fds, {**os.environ, **environment})
    child = ChildProcess[Any](process, FramedStream(trio.SocketStream(trio.socket.from_stdlib_socket(ours)), status))
    try:
        with suppress(trio.BrokenResourceError):  # it has ended already; ``status`` will return ``None``
            await child.channel.send(job)
        yield child
    finally:
        # Twice: once for the child to exit by itself, and once for the kernel to end it.
        with trio.CancelScope(shield=True), trio.move_on_after(2 * EXIT_TIMEOUT_S):
            await child.leave(EXIT_TIMEOUT_S)


async def _start(module: str, fds: Sequence[int], environment: Mapping[str, str]) -> tuple[trio.Process, socket.socket]:
    """Return the process, and our end of the socket to it."""
    backoff = RestartBackoff()
    while True:
        with ExitStack() as opened:
            try:
                ours, theirs = map(opened.enter_context, socket.socketpair())
                command, passed = _command_of(module, theirs), [theirs.fileno(), *fds]
                process = await trio.lowlevel.open_process(command, pass_fds=passed, env=environment, **OPTIONS)
            except (OSError, RuntimeError) as error:  # no file descriptors, processes, memory or threads
                pause_s = backoff.next_pause_s(0.0)
                logger.error("%s cannot be started: %s; the next attempt is in %g s", module, error, pause_s)  # noqa: TRY400
            else:
                theirs.close()  # the child alone has this end, which therefore closes when it dies
                opened.pop_all()  # our end stays open
                return process, ours
        await trio.sleep(pause_s)  # with nothing open: descriptors may be scarce


@frozen
class ChildEnd:
    """How a child ended, as a phrase for the log, and the seconds that it had been ready."""

    how: str
    was_ready_s: float


async def keep_alive(name: str, live: Callable[[], Awaitable[ChildEnd]]) -> NoReturn:
    """Call ``live()``, which runs one child and returns how it ended, repeatedly, with pauses between crashes.

    Raises the errors of ``live``. Cancellation: at once.
    """
    backoff = RestartBackoff()
    while True:
        end = await live()
        pause_s = backoff.next_pause_s(end.was_ready_s)
        logger.error("the process of %s %s; the next one starts in %g s", name, end.how, pause_s)
        await trio.sleep(pause_s)


REPORTED = ("ModelLoadError", "EngineDeadError")
"""Errors whose message is for the user: whoever runs the process reports them."""

UNWIND_S = 15
"""Seconds for all tasks of a process to end after an error."""


@asynccontextmanager
async def open_process_nursery() -> AsyncIterator[trio.Nursery]:
    """Open the nursery of all tasks of a process; ``UNWIND_S`` after it is cancelled, SIGALRM ends the process.

    Out of memory, a task's wake-up can be lost. The nursery would wait for that task for ever, with an open socket on
    which nothing is accepted. An alarm needs neither memory nor a thread. Cancellation: at once.
    """

    async def set_alarm_when_cancelled() -> None:
        try:
            await trio.sleep_forever()
        except trio.Cancelled as cancelled:  # from now on, the other tasks have ``UNWIND_S``
            signal.signal(signal.SIGALRM, signal.SIG_DFL)  # ``__main__`` ignores it
            signal.alarm(UNWIND_S)
            if cancelled.source == "nursery":  # a task has failed
                is_reported = any(f"{name}(" in str(cancelled.reason) for name in REPORTED)
                level = logging.DEBUG if is_reported else logging.CRITICAL
                logger.log(level, "an error ends this process: %s", cancelled.reason)
            raise

    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(set_alarm_when_cancelled)
            yield nursery
    finally:
        signal.alarm(0)  # all tasks have ended in time


def leave(status: int) -> NoReturn:
    """End the process at once with this exit status, after writing its last log lines."""
    logging.shutdown()
    _wait_logged()
    os._exit(status)  # Python's own exit would wait for threads, which may compute for minutes


def _wait_logged() -> None:
    """Wait until a thread has written all logged lines, for at most a second."""
    if isinstance(sys.stderr, StandardError):
        sys.stderr.wait_written()


def end_hypercorn(message: str) -> None:
    """Log why this process ends; if it is a worker of hypercorn, end its parent by a signal that it does not handle.

    Without a signal, hypercorn exits with 0, whatever its worker exits with. The log is complete by then.
    """
    logger.critical("%s", message)
    _wait_logged()
    parent = multiprocessing.parent_process()
    is_worker = "hypercorn" in Path(sys.argv[0]).parts[-2:]
    if is_worker and parent is not None and parent.pid is not None and parent.is_alive():
        os.kill(parent.pid, signal.SIGUSR1)


def flush_and_leave(status: int) -> NoReturn:
    """Flush stdout and stderr, and end the process even while a thread computes a batch, which would abort the exit."""
    sys.stdout.flush()
    sys.stderr.flush()
    leave(status)


class LoadFailed(msgspec.Struct, tag=True, array_like=True):
    """Message of a child that ends because a model cannot be loaded: the reason, for the user."""

    message: str


def run_as_child(main: Callable[[FramedStream[Any], Any], Awaitable[int | None]], job_type: Any) -> None:
    """Run ``main(channel, job)`` as a child process, and exit with its status even if threads still run.

    If it raises ``ModelLoadError`` or ``EngineDeadError``, send ``LoadFailed`` to the parent, and exit with status 1.
    """
    for ignored in (signal.SIGINT, signal.SIGTERM):
        signal.signal(ignored, signal.SIG_IGN)
    leave(trio.run(_run, main, job_type))


async def _run(main: Callable[[FramedStream[Any], Any], Awaitable[int | None]], job_type: Any) -> int:
    parent = trio.socket.from_stdlib_socket(socket.socket(fileno=int(sys.argv[1])))
    channel = FramedStream[Any](trio.SocketStream(parent), job_type)
    received = await channel.receive()
    try:
        with unwrap_exception_groups(ModelLoadError, EngineDeadError):
            # ``None``: the parent has died, or given up, before it sent the job.
            return 0 if received is None else (await main(channel, received[0]) or 0)
    except (ModelLoadError, EngineDeadError) as error:
        await send_to_parent(channel, LoadFailed(sendable(str(error))))
        return 1


async def send_to_parent(channel: FramedStream[Any], status: object) -> None:
    """Send a message to the parent, unless it has ended. Cancellation: at once; the channel is unusable afterwards."""
    with suppress(trio.BrokenResourceError):
        await channel.send(status)


async def wait_for_parent(channel: FramedStream[Any]) -> None:
    """Wait until the parent has ended or closed the channel, ignoring its messages. Cancellation: at once."""
    while await channel.receive() is not None:
        continue
