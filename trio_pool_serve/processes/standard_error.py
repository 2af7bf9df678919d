"""Standard error that never blocks: a thread writes the output and logs of the process.

Its reader may stall (a log shipper, a terminal after Ctrl-S) or end, and its disk may be full. That must neither stop
an event loop nor fail a load, during which libraries print progress.
"""

import atexit
import io
import logging
import os
import stat
import sys
import threading
from contextlib import suppress
from functools import partial

from trio_pool_serve.threads.dedicated_threads import start_thread

logger = logging.getLogger(__name__)

MAX_WAITING_BYTES = 2**22
"""Limit of waiting lines: about 10,000 of the access log, of which a process logs 100 a second by default."""

FLUSH_S = 1.0
"""Seconds to write waiting lines when the process exits: the last ones say why."""


class StandardError(io.TextIOWrapper):
    """A ``sys.stderr`` that never blocks and never raises. Lines that cannot be written are dropped and counted."""

    def __init__(self, fd: int) -> None:
        super().__init__(io.FileIO(fd, "wb", closefd=False), "utf-8")
        self.dropped_lines = self._logged_lines = self._waiting_bytes = 0
        self._lock = threading.RLock()  # a signal handler may write while the function that it interrupts does
        self._jobs = start_thread("stderr")

    def write(self, text: str, /) -> int:
        """Queue ``text`` for the thread, or drop it if too much waits already."""
        encoded = text.encode(errors="backslashreplace")
        with self._lock:
            fits = self._waiting_bytes + sys.getsizeof(encoded) <= MAX_WAITING_BYTES
            self._waiting_bytes += sys.getsizeof(encoded) if fits else 0
            self.dropped_lines += 0 if fits else encoded.count(b"\n")
        if fits:
            self._jobs.put(partial(self._write, encoded))
        return len(text)

    def wait_written(self) -> None:
        """Wait up to ``FLUSH_S`` until all output so far is written or dropped. Blocks."""
        written = threading.Event()
        self._jobs.put(written.set)
        written.wait(FLUSH_S)

    def _write(self, encoded: bytes) -> None:
        left = encoded
        with suppress(OSError):  # a closed pipe, a full disk
            while left:
                left = left[os.write(self.fileno(), left) :]
        with self._lock:
            self._waiting_bytes -= sys.getsizeof(encoded)
            self.dropped_lines += left.count(b"\n")
            has_room = not left and self._waiting_bytes < MAX_WAITING_BYTES // 2
            missing = self.dropped_lines - self._logged_lines if has_room else 0
            self._logged_lines += missing
        if missing:
            logger.warning("%d log lines were dropped: nothing read standard error, or its disk was full", missing)


def detach_standard_error() -> None:
    """Make ``sys.stderr`` a ``StandardError``, whose last lines are written before the process exits."""
    if not isinstance(sys.stderr, StandardError):
        sys.stderr = StandardError(_open_for_thread())
        atexit.register(sys.stderr.wait_written)


def _open_for_thread() -> int:
    """Return a descriptor of standard error for blocking writes; writes to descriptor 2, by C libraries, fail instead.

    Both are opened anew, because the flag belongs to the open file, which other programs share. Sockets and other
    users' pipes cannot be opened anew: then writes to descriptor 2 may still block.
    """
    if not stat.S_ISFIFO(os.fstat(2).st_mode) and not os.isatty(2):
        return 2
    try:
        blocking, failing = (os.open("/proc/self/fd/2", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY) for _ in "12")
    except OSError:
        return 2
    os.set_blocking(blocking, True)
    os.dup2(failing, 2)
    os.close(failing)
    return blocking
