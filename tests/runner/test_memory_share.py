"""The memory of one GPU among several real processes; the GPU is a folder with a file for what each of them uses."""

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.scripted_runner import ScriptedRunner
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
from trio_pool_serve.storage.file_lock import locked as locked_alone
from trio_pool_serve.types import RunnerParams

used, lock, processes = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])

def load():
    print("loading", flush=True)
    sys.stdin.readline()
    used.write_text("{WEIGHTS}")
    return prepare

def prepare(params):
    share = params.memory_share(lambda: {TOTAL} - sum(int(each.read_text()) for each in used.parent.iterdir()))
    used.write_text(str({WEIGHTS} + share))
    print(share, flush=True)
    sys.stdin.readline()
    return ScriptedRunner()

load_with_share(load, lock, processes)(RunnerParams())
"""


@contextmanager
def loading(folder: Path, names: Sequence[str], processes: int) -> Iterator[list[subprocess.Popen]]:
    """Run processes that load until they get a line, and print their shares once they have them."""
    (folder / "gpu").mkdir(exist_ok=True)
    with ExitStack() as stack:
        started = []
        for name in names:
            command = [sys.executable, "-c", PROCESS, folder / "gpu" / name, folder / "lock", str(processes)]
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            started.append(stack.enter_context(subprocess.Popen(command, cwd=ROOT, **pipes)))
            stack.callback(started[-1].kill)
        for process in started:
            assert process.stdout.readline() == "loading\n"
        yield started


def go(process: subprocess.Popen) -> None:
    process.stdin.write("\n")
    process.stdin.flush()


def share_of(process: subprocess.Popen) -> int:
    return int(process.stdout.readline())


@pytest.mark.slow
def test_all_get_the_same_share_of_what_all_weights_leave_and_so_does_one_that_is_replaced(tmp_path: Path):
    with loading(tmp_path, "abc", 3) as processes:
        for process, name in zip(processes, "abc", strict=True):
            go(process)
            while not (tmp_path / "gpu" / name).exists():
                pass
        expected = int(0.95 * (TOTAL - 3 * WEIGHTS) / 3)
        assert [share_of(process) for process in processes] == [expected] * 3
        processes[1].kill()
        processes[1].wait()
        with loading(tmp_path, "b", 1) as (replacing,):
            go(replacing)
            assert share_of(replacing) == expected


@pytest.mark.slow
def test_one_that_dies_while_it_loads_keeps_nobody_waiting_and_its_share_is_left_to_its_successor(tmp_path: Path):
    with loading(tmp_path, "ab", 2) as (first, second):
        go(first)
        second.kill()
        expected = int(0.95 * (TOTAL - WEIGHTS) / 2)
        assert share_of(first) == expected
        with loading(tmp_path, "b", 1) as (replacing,):
            go(replacing)
            assert share_of(replacing) == expected


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

    endless = load_with_share(load, tmp_path / "lock", 2)
    load_with_share(load_sharing, tmp_path / "lock", 2)(RunnerParams())
    assert shares == [475]
    endless(RunnerParams())  # without a share: a model that torch does not compute
    with locked_alone(tmp_path / "lock", waits=False) as is_locked:
        assert is_locked
