"""The memory of one GPU among several real processes; the GPU is a folder with a file for what each of them uses."""

import io
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from attrs import define

from tests.scripted_runner import ScriptedRunner
from trio_pool_serve.processes.socket_folder import open_with_shared_lock
from trio_pool_serve.runner import memory_share
from trio_pool_serve.runner.memory_share import load_with_share
from trio_pool_serve.storage.file_lock import locked as locked_alone
from trio_pool_serve.types import RunnerParams

ROOT = Path(__file__).parents[2]

TOTAL, WEIGHTS = 10_000, 100

PROCESS = f"""
import sys
from pathlib import Path
from tests.scripted_runner import ScriptedRunner
from trio_pool_serve.runner.memory_share import load_with_share
from trio_pool_serve.types import RunnerParams

used, file, processes = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])

def load():
    used.write_text("{WEIGHTS}")
    print("loaded", flush=True)
    return prepare

def prepare(params):
    share = params.memory_share(lambda: {TOTAL} - sum(int(each.read_text()) for each in used.parent.iterdir()))
    used.write_text(str({WEIGHTS} + share))
    print(share, flush=True)
    sys.stdin.readline()
    return ScriptedRunner()

sys.stdin.readline()
load_with_share(load, file, processes)(RunnerParams())
"""


@define(eq=False)
class Loading:
    """A process that loads once it is told to, and prints its share once it has it."""

    process: subprocess.Popen
    file: io.FileIO

    def go(self) -> None:
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "loaded\n"

    @property
    def share(self) -> int:
        return int(self.process.stdout.readline())

    def kill(self) -> None:
        """Kill it, and do as its parent does then."""
        self.process.kill()
        self.process.wait()
        self.file.close()


@contextmanager
def loading(folder: Path, names: Sequence[str], processes: int) -> Iterator[list[Loading]]:
    """Start processes with a file for each, as the supervisor does."""
    (folder / "gpu").mkdir(exist_ok=True)
    with ExitStack() as stack:
        files = [stack.enter_context(open_with_shared_lock(folder / "lock")) for _ in names]
        started = []
        for name, file in zip(names, files, strict=True):
            number = file.fileno()
            command = [sys.executable, "-c", PROCESS, folder / "gpu" / name, str(number), str(processes)]
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            process = stack.enter_context(subprocess.Popen(command, cwd=ROOT, pass_fds=[number], **pipes))
            started.append(Loading(process, file))
            stack.callback(process.kill)
        yield started


@pytest.mark.slow
def test_all_get_the_same_share_of_what_all_weights_leave_and_so_does_one_that_is_replaced(tmp_path: Path):
    """Also if one has loaded before others have imported torch."""
    with loading(tmp_path, "abc", 3) as processes:
        for process in processes:
            process.go()
        expected = int(0.95 * (TOTAL - 3 * WEIGHTS) / 3)
        assert [process.share for process in processes] == [expected] * 3
        processes[1].kill()
        with loading(tmp_path, "b", 1) as (replacing,):
            replacing.go()
            assert replacing.share == expected


@pytest.mark.slow
def test_one_that_dies_while_it_loads_keeps_nobody_waiting_and_its_share_is_left_to_its_successor(tmp_path: Path):
    with loading(tmp_path, "ab", 2) as (first, second):
        first.go()
        second.kill()
        expected = int(0.95 * (TOTAL - WEIGHTS) / 2)
        assert first.share == expected
        with loading(tmp_path, "b", 1) as (replacing,):
            replacing.go()
            assert replacing.share == expected


def test_one_that_loads_without_end_keeps_others_waiting_for_a_limited_time_and_is_not_waited_for_once_it_is_ready(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(memory_share, "LOADING_S", 0.1)
    shares: list[int] = []

    def load() -> ScriptedRunner:
        return ScriptedRunner()

    def load_sharing():
        def prepare(params: RunnerParams) -> ScriptedRunner:
            shares.append(params.memory_share(lambda: 1000))
            return ScriptedRunner()

        return prepare

    with open_with_shared_lock(tmp_path / "lock") as first, open_with_shared_lock(tmp_path / "lock") as second:
        endless = load_with_share(load, os.dup(first.fileno()), 2)
        load_with_share(load_sharing, os.dup(second.fileno()), 2)(RunnerParams())
        assert shares == [475]
        endless(RunnerParams())  # without a share: a model that torch does not compute
        with locked_alone(tmp_path / "lock", waits=False) as is_locked:
            assert is_locked
