"""A terminal in which a test runs a command, and what is seen on it."""

import os
import pty
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import trio
from attrs import define, field

from tests.conftest import until
from tests.server.server_process import ROOT, START_LIMIT_S

CONTROLLED = (
    sys.executable,
    "-c",
    "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])",
)
"""Runs a command in the foreground of the terminal on its standard input, so that Ctrl-C reaches it."""

CODES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\r|[⠀-⣿]|\d:\d\d:\d\d")
"""Control codes, the spinner, and the time so far."""


@define(eq=False)
class Terminal:
    """A command that runs in a terminal, and all that it has written to it."""

    process: subprocess.Popen[bytes]
    _fd: int
    _written: bytearray = field(init=False, factory=bytearray)

    @property
    def raw(self) -> str:
        return self._written.decode(errors="replace")

    @property
    def seen(self) -> list[str]:
        """What has been on each line, one after another; repetitions are left out."""
        states: list[str] = []
        for line in re.split(r"\n|\x1b\[2K", self.raw):
            state = CODES.sub("", line).strip()
            if state and state not in states[-1:]:
                states.append(state)
        return states

    async def wait_seen(self, text: str) -> None:
        def is_seen() -> bool:
            assert self.process.poll() is None, self.raw
            return any(text in line for line in self.seen)

        await until(is_seen, START_LIMIT_S, pause_s=0.01)

    async def wait_exit(self) -> int:
        with trio.fail_after(START_LIMIT_S):
            return await trio.to_thread.run_sync(self.process.wait, abandon_on_cancel=True)

    def interrupt(self) -> None:
        """Press Ctrl-C."""
        os.write(self._fd, b"\x03")

    async def read(self) -> None:
        """Read what is written, until all processes have closed the terminal."""
        with suppress(OSError):
            while piece := await trio.to_thread.run_sync(os.read, self._fd, 2**16, abandon_on_cancel=True):
                self._written += piece


@asynccontextmanager
async def in_terminal(command: Sequence[str | Path], env: Mapping[str, str]) -> AsyncIterator[Terminal]:
    """Run a command in a terminal of its own; kill what is left of it in the end."""
    own, theirs = pty.openpty()
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("TRIO_POOL_SERVE_")}
    try:
        process = subprocess.Popen(  # noqa: ASYNC220  (it blocks for a millisecond)
            [*CONTROLLED, *command],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
            cwd=ROOT,
            env={**inherited, "TERM": "xterm-256color", "COLUMNS": "200", "HF_HUB_OFFLINE": "1", **env},
        )
    finally:
        os.close(theirs)
    terminal = Terminal(process, own)
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(terminal.read)
            yield terminal
            await terminal.wait_exit()
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        os.close(own)
