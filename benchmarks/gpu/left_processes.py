"""Ends the processes that a run leaves when it is killed; ``python -m benchmarks.gpu.left_processes`` waits for that.

A run that is killed stops nothing that it has started, and a server would go on computing on the GPU. Whatever a run
starts, in whichever process group, inherits a variable of its environment, by which its processes are found.
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

VARIABLE = "BENCHMARKS_GPU_RUN"
"""Not of the server's prefix, under which it knows all variables."""

STOP_S = 10.0
"""How long processes have after SIGTERM."""


@contextmanager
def open_run() -> Iterator[Path]:
    """Mark this process and all that it starts inside the block; the value is a folder for the run's files.

    The folder and the processes end with the block, and also if this process is killed.
    """
    os.environ[VARIABLE] = mark = uuid.uuid4().hex
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", __name__, mark, folder]
        # Its own session: a signal for this process's group, as of Ctrl-C, is not for it.
        watcher = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
        try:
            yield Path(folder)
        finally:
            del os.environ[VARIABLE]
            watcher.communicate()


def marked(mark: str, variable: str = VARIABLE) -> set[int]:
    """Return the ids of the other processes that were started with a run's mark."""
    wanted, found = f"{variable}={mark}".encode(), set()
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if wanted in (path / "environ").read_bytes().split(b"\0"):
                found.add(int(path.name))
    return found - {os.getpid()}


def end_left(mark: str) -> None:
    """Send SIGTERM to the processes that a run has left, and SIGKILL to those that have not ended by then."""
    ends = time.monotonic() + STOP_S
    told: set[int] = set()
    while left := marked(mark):
        overdue = time.monotonic() > ends
        for pid in left if overdue else left - told:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL if overdue else signal.SIGTERM)
        told |= left
        time.sleep(0.1)


if __name__ == "__main__":
    sys.stdin.buffer.read()
    end_left(sys.argv[1])
    shutil.rmtree(sys.argv[2], ignore_errors=True)
