"""Files, pipes and terminals to which nothing more can be written."""

import fcntl
import os
import pty
import termios
from collections.abc import Iterator
from contextlib import contextmanager

PIPE_BYTES = 2**12
"""What a small pipe takes until somebody reads: the least that Linux has."""


def small_pipe() -> tuple[int, int]:
    """Return the end to read and the end to write of a pipe that is soon full."""
    unread, end = os.pipe()
    fcntl.fcntl(end, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    return unread, end


@contextmanager
def unread_pipe() -> Iterator[int]:
    """A pipe whose reader has stalled, and which is full."""
    unread, end = small_pipe()
    os.write(end, b"x" * PIPE_BYTES)
    yield end
    os.close(unread)
    os.close(end)


@contextmanager
def closed_pipe() -> Iterator[int]:
    """A pipe whose reader has ended."""
    unread, end = os.pipe()
    os.close(unread)
    yield end
    os.close(end)


@contextmanager
def full_disk() -> Iterator[int]:
    """A file on a disk that has no space left."""
    with open("/dev/full", "wb") as full:  # noqa: PTH123
        yield full.fileno()


@contextmanager
def stopped_terminal() -> Iterator[int]:
    """A terminal after Ctrl-S."""
    screen, terminal = pty.openpty()
    termios.tcflow(terminal, termios.TCOOFF)
    yield terminal
    os.close(screen)
    os.close(terminal)
