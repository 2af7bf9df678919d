"""Runs that are killed go on where they were, and write the bytes of one that was not."""

import os
import random
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import msgspec
import pytest

from tests.bulk.test_commands import ROWS, write_rows
from tests.lanes import sampled
from tests.models.model_families import write_family
from tests.server.server_process import ROOT
from trio_pool_serve.runs.run import Position

PROGRAM = """
import os
import sys
from trio_pool_serve.bulk import commands
from trio_pool_serve.bulk.bulk_options import OwnModelOptions, RunOptions, TextOptions
from trio_pool_serve.runs.journal import Journal
from trio_pool_serve.runs.tables import table_windows
from trio_pool_serve.bulk.own_engine import OwnEngine
from trio_pool_serve.runs.tables.output_table import LineOutput, PartFolder
from trio_pool_serve.processes.child_process import flush_and_leave

model, source, target, moment, times, number, computed = sys.argv[1:]
seen = 0


def come_to(name):
    global seen
    if name == moment:
        seen += 1
        if seen == int(times):
            os.kill(os.getpid(), int(number))


def around(kind, method, name):
    original = getattr(kind, method)

    def wrapped(self, *arguments):
        come_to(f"before {name}")
        result = original(self, *arguments)
        come_to(f"after {name}")
        return result

    setattr(kind, method, wrapped)


async def commit(self, progress, original=Journal.commit):
    await original(self, progress)
    come_to("after journal")


async def compute(self, rows, original=OwnEngine.compute):
    with open(computed, "a") as file:
        file.writelines(f"{row.number}\\n" for row in rows if row.place.startswith("rows.jsonl:"))  # no sample
    return await original(self, rows)


for kind in (LineOutput, PartFolder):
    around(kind, "write", "write")
    around(kind, "commit", "commit")
Journal.commit = commit
OwnEngine.compute = compute
table_windows.WINDOW_ROWS = 64
options = commands.TableOptions(
    run=RunOptions(model=model, rows_per_file=128, on_error="skip"),
    text=TextOptions(truncate=True),
    own=OwnModelOptions(model_dtype="float32", device="cpu", backend="torch"),
)
flush_and_leave(commands.start(source, target, options, "embed", "text"))
"""
"""The command with small windows, so that a short run has many commits. It sends itself a signal at a moment, and lists
the numbers of the rows that it computes."""

WRONG = 100
"""The number of the row that is not computed."""

MOMENTS_OF = {
    ".jsonl": ("before write", "after commit"),
    ".gz": ("after write", "after journal"),
    ".parquet": ("before commit", "after commit"),
}


def start(
    model: Path,
    rows: Path,
    out: Path,
    moment: str = "",
    times: int = 0,
    number: int = signal.SIGKILL,
    computed: str | Path = os.devnull,
) -> subprocess.Popen[bytes]:
    """Start a run that sends itself a signal when it comes to a moment for so many times."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1"}
    arguments = map(str, (model, rows, out, moment, times, int(number), computed))
    command = [sys.executable, "-c", PROGRAM, *arguments]
    return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


def ended(run: subprocess.Popen[bytes]) -> tuple[int, str]:
    """Wait for the end of a run; return its status, and what it has printed."""
    _, printed = run.communicate()
    return run.returncode, printed.decode()


def committed(out: Path) -> Position:
    """Return what the journal says of a run that has ended."""
    journal = out.with_name(f"{out.name}.journal")
    assert journal.exists()
    with closing(sqlite3.connect(journal)) as connection:
        found = connection.execute("SELECT value FROM run WHERE name = 'position'").fetchone()
    return msgspec.json.decode(found[0], type=Position) if found else Position()


def content(out: Path) -> dict[str, bytes]:
    files = sorted(out.iterdir()) if out.is_dir() else [out]
    return {file.name: file.read_bytes() for file in [*files, Path(f"{out}.errors.jsonl")]}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_family(tmp_path_factory.mktemp("model") / "bert", name="bert")


@pytest.fixture(scope="module")
def rows(tmp_path_factory) -> Path:
    many = [{**row, "id": f"{number}-{row['id']}"} for number in range(200) for row in ROWS]
    many[WRONG] = {"id": "wrong"}
    return write_rows(tmp_path_factory.mktemp("rows") / "rows.jsonl", many)


@pytest.fixture(scope="module")
def uninterrupted(model, rows, tmp_path_factory) -> Callable[[str], Path]:
    """Returns the output of that name of a run that was not interrupted: a process takes seconds to start."""
    folder = tmp_path_factory.mktemp("whole")

    def output_named(name: str) -> Path:
        out = folder / name
        if not out.exists():
            assert ended(start(model, rows, out))[0] == 3
        return out

    return output_named


@sampled("name", ["out.jsonl", "out.parquet", "out.csv.gz"], keep=["out.jsonl"])
def test_a_run_that_is_killed_again_and_again_writes_the_same_bytes(tmp_path, model, rows, uninterrupted, name):
    """Killed at two moments; what was committed stays, and no row before it is computed again, but all behind it."""
    whole, out, computed = uninterrupted(name), tmp_path / name, tmp_path / "computed"
    rng, before = random.Random(name), 0
    for moment in MOMENTS_OF[whole.suffix]:
        status, printed = ended(start(model, rows, out, moment, rng.randint(2, 3), computed=computed))
        assert status == -signal.SIGKILL, printed
        assert min(taken_numbers(computed)) == before
        assert committed(out).line >= before
        before = committed(out).line
    assert before > 0
    assert ended(start(model, rows, out, computed=computed))[0] == 3
    assert taken_numbers(computed) == [n for n in range(before, 200 * len(ROWS)) if n != WRONG]
    assert content(out) == content(whole)


def taken_numbers(computed: Path) -> list[int]:
    """Return the sorted numbers of the rows that a run has listed, and begin an empty list for the next one."""
    numbers = sorted(map(int, computed.read_text().split()))
    computed.unlink()
    return numbers


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_commits_and_stops_and_the_same_command_goes_on(tmp_path, model, rows, uninterrupted, number):
    out = tmp_path / "out.jsonl"
    status, printed = ended(start(model, rows, out, "after journal", 2, number))
    assert status == 130
    assert "The same command resumes" in printed
    stopped = committed(out)
    assert not stopped.is_finished
    assert out.stat().st_size == stopped.output_bytes
    assert ended(start(model, rows, out))[0] == 3
    assert content(out) == content(uninterrupted("out.jsonl"))


@pytest.mark.slow
def test_a_run_without_a_journal_that_is_stopped_says_that_it_begins_again(model, rows):
    status, printed = ended(start(model, rows, Path("-"), "after journal", 2, signal.SIGINT))
    assert status == 130
    assert "The same command starts again: with standard input or output, no journal is kept" in printed


@pytest.mark.slow
def test_a_full_disk_loses_nothing(small_disk, model, rows, uninterrupted):
    """A disk of 2 MiB; the run goes on once there is room."""
    filler, out = small_disk / "filler", small_disk / "out.jsonl"
    filler.write_bytes(bytes(1_600_000))
    status, printed = ended(start(model, rows, out))
    assert status == 1, printed
    assert "No space left on device" in printed
    filler.unlink()
    assert 0 < committed(out).line < 200 * len(ROWS)
    assert ended(start(model, rows, out))[0] == 3
    assert content(out) == content(uninterrupted("out.jsonl"))
