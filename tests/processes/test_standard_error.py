"""Standard error that nobody reads, that is gone, or whose disk is full."""

import logging
import os
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from tests.lanes import sampled
from tests.unwritable_files import PIPE_BYTES, closed_pipe, full_disk, small_pipe, stopped_terminal, unread_pipe
from trio_pool_serve.processes.standard_error import MAX_WAITING_BYTES, StandardError

LINE = "x" * 1023 + "\n"

LIMIT_S = 60


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    """A pipe that is soon full: the end to read, and the end to write."""
    ends = small_pipe()
    yield ends
    for end in ends:
        os.close(end)


def read(pipe_end: int, size: int) -> bytes:
    """Read exactly so much."""
    received = bytearray()
    while len(received) < size:
        received += os.read(pipe_end, size - len(received))
    return bytes(received)


def test_lines_that_an_unread_pipe_does_not_take_are_dropped_and_counted_in_the_log(pipe, caplog):
    """Every line is either written or counted as dropped."""
    unread, end = pipe
    log = StandardError(end)
    in_pipe = PIPE_BYTES // len(LINE)
    lines = MAX_WAITING_BYTES // sys.getsizeof(LINE.encode()) + in_pipe + 50
    for _ in range(lines):
        assert log.write(LINE) == len(LINE)  # it would block here
    assert 50 <= log.dropped_lines <= 50 + in_pipe
    written = read(unread, (lines - log.dropped_lines) * len(LINE))
    assert written.decode() == LINE * (lines - log.dropped_lines)
    log.wait_written()
    (record,) = [record for record in caplog.records if "dropped" in record.getMessage()]
    assert record.levelno == logging.WARNING
    assert record.getMessage().startswith(f"{log.dropped_lines} log lines were dropped")


def test_lines_are_written_in_order_whoever_writes_them(pipe):
    """What one thread writes keeps its order among what others write."""
    log = StandardError(pipe[1])

    def write(name: int) -> None:
        for number in range(200):
            log.write(f"{name} {number:04}\n")

    threads = [threading.Thread(target=write, args=(name,)) for name in range(4)]
    for thread in threads:
        thread.start()
    lines = read(pipe[0], 4 * 200 * len(b"0 0000\n")).splitlines()
    for thread in threads:
        thread.join()
    for name in range(4):
        assert [line for line in lines if line.startswith(b"%d " % name)] == [
            b"%d %04d" % (name, number) for number in range(200)
        ]


def test_lines_that_a_full_disk_does_not_take_are_counted():
    """The disk is /dev/full, which has no space left whatever is written."""
    full = os.open("/dev/full", os.O_WRONLY)
    try:
        log = StandardError(full)
        log.write(LINE * 3)
        log.wait_written()
        assert log.dropped_lines == 3
    finally:
        os.close(full)


# -- whole processes -----------------------------------------------------------------------------------


PRINTS = """
import ctypes, logging, sys, warnings
from rich.console import Console
from tqdm import tqdm
from trio_pool_serve.processes.standard_error import detach_standard_error

detach_standard_error()
line = "x" * 1000
for _ in tqdm(range(100)):
    print(line, file=sys.stderr)
    warnings.warn(line)
    logging.error(line)  # by the handler of last resort, or that of basicConfig
Console(stderr=True).print(line)
libc = ctypes.CDLL(None)
for _ in range(100):
    libc.write(2, line.encode(), len(line))  # as libraries in C do
print("done")
"""


@sampled("open_stderr", [unread_pipe, closed_pipe, full_disk, stopped_terminal], keep=[unread_pipe, full_disk])
def test_a_process_ends_as_usual_whatever_becomes_of_its_output(open_stderr):
    """Neither Python nor a library in C waits, or is told that a write has failed."""
    with open_stderr() as stderr:
        ended = subprocess.run(
            [sys.executable, "-c", PRINTS], stdout=subprocess.PIPE, stderr=stderr, timeout=LIMIT_S, check=True
        )
    assert ended.stdout == b"done\n"


FAILS = """
import sys
from trio_pool_serve.processes.standard_error import detach_standard_error
detach_standard_error()
print("first", file=sys.stderr)
raise ValueError("unlucky")
"""


def test_the_traceback_of_a_process_that_fails_is_written():
    """What was printed before is written, too: the exit waits for it."""
    ended = subprocess.run([sys.executable, "-c", FAILS], capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert ended.returncode == 1
    lines = ended.stderr.splitlines()
    assert (lines[0], lines[-1]) == ("first", "ValueError: unlucky")
