"""The quick parts: what is on their page, and what is left when they are cut off."""

import os
import subprocess
import sys
from functools import partial

import attrs
import numpy as np
import pytest
import trio

from benchmarks.bert_shapes import LARGER, SIZES, VOCABULARY, parameters_of, write_larger
from benchmarks.gpu import left_processes, short_loads
from benchmarks.gpu.__main__ import MODELS, QUICK_S, parts_of, quick_parts, run_parts
from benchmarks.gpu.contender import Contender
from benchmarks.gpu.left_processes import VARIABLE, end_left, marked
from benchmarks.gpu.mps import CONTROL, open_mps
from benchmarks.gpu.page import write_page
from benchmarks.gpu.part import Findings, Part, Subject
from benchmarks.gpu.server_load import Measured
from benchmarks.gpu.settings import TRIAL_FACTOR, Settings
from benchmarks.gpu.short_loads import ShortLoads, load_of
from benchmarks.model import Texts, oracle_vectors
from benchmarks.servers import ROOT
from tests.benchmarks.test_gpu_parts import ENDLESS, FAILING, MACHINE, PASSING
from tests.benchmarks.test_gpu_selection import GPU
from trio_pool_serve.runner.cuda.packed_inputs import PackedShape

OF_THIS_TEST = "BENCHMARKS_GPU_TEST"

COMMAND = [sys.executable, "-m", "benchmarks.gpu", "--quick", "--device", "cpu", "--shape", "tiny", "--seconds", "0.3"]


@pytest.fixture
def subject(tmp_path):
    settings = Settings(device="cpu", shape="tiny", output_dir=tmp_path)
    return Subject(settings=settings, bert=tmp_path / "bert", splade=tmp_path / "splade")


def test_all_quick_parts_fit_into_nine_minutes_and_no_two_rows_are_alike():
    assert sum(part.budget_s for part in (MODELS, *quick_parts(against=False))) <= QUICK_S < 540
    rows = [aim.row for part in quick_parts(against=True) for aim in part.aims]
    assert len(rows) == len(set(rows))
    assert quick_parts(against=True)[0].name == "tests"


def test_the_other_checkout_has_rows_only_if_there_is_one(tmp_path):
    def others(settings):
        parts, left_out = parts_of(settings)
        assert {report.failure for report in left_out} <= {"--only"}
        return [aim.row for part in parts for aim in part.aims if "other checkout" in aim.row]

    assert others(Settings(quick=True)) == []
    assert len(others(Settings(quick=True, against=ROOT))) == 1 + 3 * len(short_loads.ALL)
    assert others(Settings(quick=True, against=ROOT, only=("tests",))) == []
    for wrong in ({"quick": True, "against": tmp_path}, {"against": ROOT}):
        with pytest.raises(ValueError, match="--against"):
            Settings(**wrong)


async def test_the_page_is_written_after_each_part_that_has_measured_something(subject, autojump_clock):
    nothing, pages = Part(name="nothing", budget_s=5, run=PASSING.run), []

    def write(done, rest):
        was_written = write_page([*done, *rest], subject, MACHINE)
        pages.append((subject.settings.folder / "gpu.md").read_text() if was_written else None)

    await run_parts([nothing, FAILING, PASSING], subject, write=write)
    assert pages[0] is None, "the page of an earlier run stays"
    assert "| fast | failing | ≥ 2 | 2 | reached |  |" in pages[1]
    assert "| fast | passing | ≥ 2 | – | not measured | the run ended before it |" in pages[1]
    assert "### passing\n\nNot run: the run ended before it." in pages[1]
    assert "| fast | passing | ≥ 2 | 3 | reached | three |" in pages[2]
    assert "the run ended" not in pages[2]


async def test_parts_for_which_no_time_is_left_are_not_run(subject, autojump_clock):
    parts = [ENDLESS, attrs.evolve(ENDLESS, name="cut"), PASSING]
    limit_s = 1.5 * ENDLESS.budget_s * TRIAL_FACTOR
    reports = await run_parts(parts, subject, limit_s=limit_s)
    assert [report.took_s for report in reports] == [150, 75, 0]
    assert [report.was_run for report in reports] == [True, True, False]
    assert reports[2].rows[0].note == f"{limit_s:g} s were over"


def test_fill_is_that_of_the_smallest_graph_with_room():
    load = load_of(50, 64, 1024)
    measured = Measured(shapes=[PackedShape(tokens, 8, 128) for tokens in (1024, 1536, 2048)])
    assert measured.fill_of(load) is None
    measured.batch_tokens[load.aim] = [1500.0, 1572.0]
    assert measured.fill_of(load) == 1.0
    measured.batch_tokens[load.aim] = [1638.4]
    assert measured.fill_of(load) == 0.8
    measured.batch_tokens[load.aim] = [4000.0]
    assert measured.fill_of(load) is None


def test_a_server_with_unknown_flags_is_left_out_with_the_reason():
    known, strange = Contender(name="known"), Contender(name="strange", flags=("--no-such-flag", "1"))
    loads, findings = ShortLoads(contenders=(known, strange), loads=(load_of(50, 64, 8),)), Findings()
    assert not loads._is_refused(known, findings)
    assert loads._is_refused(strange, findings)
    assert len(findings.values) == 3, "its vectors, its rate, and the ratio"
    assert {value for value, _ in findings.values.values()} == {None}
    assert all("--no-such-flag" in reason for _, reason in findings.values.values())


@pytest.mark.parametrize("name", LARGER)
def test_larger_models_can_be_loaded_and_tell_texts_apart(name, tmp_path):
    folder = write_larger(tmp_path / name, name, "tiny")
    vectors = oracle_vectors(Texts(str(folder)).make(2, 12), str(folder))
    assert np.allclose(np.linalg.norm(vectors, axis=1), 1)
    assert float(vectors[0] @ vectors[1]) < 0.99
    assert 0 < parameters_of(folder) < VOCABULARY * SIZES["tiny"]["hidden_size"], "without the table of tokens"


def test_what_a_run_has_left_is_ended(monkeypatch):
    monkeypatch.setattr(left_processes, "STOP_S", 0.3)
    code = (
        "import signal, sys; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True); signal.pause()"
    )
    mark = f"mark-{os.getpid()}"
    command = [sys.executable, "-c", code]
    with subprocess.Popen(
        command, env={**os.environ, VARIABLE: mark}, stdout=subprocess.PIPE, start_new_session=True
    ) as left:
        left.stdout.readline()
        assert marked(mark) == {left.pid}
        end_left(mark)
        assert left.wait(10) == -9
    assert marked(mark) == set()


async def test_without_a_gpu_engines_are_time_sliced(subject):
    findings = Findings()
    async with open_mps(subject, findings) as variables:
        assert variables == {}
    assert findings.texts == ["Time-sliced, without MPS: there is no GPU."]


@pytest.mark.slow
async def test_a_daemon_through_which_there_is_no_gpu_is_ended(subject, monkeypatch, tmp_path):
    program, called = tmp_path / CONTROL, tmp_path / "called"
    program.write_text(f'#!/bin/sh\necho "$CUDA_MPS_PIPE_DIRECTORY $*" >> {called}\n[ "$1" = -d ] || cat >> {called}\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    findings = Findings()
    on_gpu = attrs.evolve(subject, gpu=GPU, settings=Settings(output_dir=tmp_path))
    async with open_mps(on_gpu, findings) as variables:
        assert variables == {}
    (text,) = findings.texts
    assert text.startswith("Time-sliced, without MPS: through it, torch ")
    started, ended, command = called.read_text().splitlines()
    assert (started.split()[1:], ended.split()[1:], command) == (["-d"], [], "quit")
    assert started.split()[0] == ended.split()[0]


@pytest.mark.slow
def test_a_quick_trial_has_servers_in_turns_and_passes_alone(tmp_path):
    parts = ["engines-1", "attention"]
    command = [*COMMAND, "--against", str(ROOT), "--only", *parts, "--output-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    page = (tmp_path / "gpu.md").read_text()
    assert done.returncode == 0, page
    assert "may have changed over" not in page
    for line in (
        "1 engine: compiled code computes from now on, ",
        "1 engine, eager: `TORCHDYNAMO_DISABLE=1 trio_pool_serve serve bert ",
        "| FA3: tokens/s of passes alone, rows of 50 tokens | attention | – | – | not measured | package absent:",
        "Snowflake Arctic Inference",
        "### engines-8\n\nNot run: --only.",
    ):
        assert line in page
    for measured in (
        *(f"| 1 engine ÷ the other checkout: {load.aim.row} | engines-1 | – " for load in short_loads.ALL),
        "| 1 engine, eager: least cosine with float32 | engines-1 ",
        "| FA2: tokens/s of passes alone, rows of 512 tokens | attention | – ",
    ):
        (line,) = [line for line in page.splitlines() if line.startswith(measured)]
        assert "not measured" not in line


@pytest.mark.alone  # beside other tests its servers take twenty times as long to start
async def test_a_killed_run_leaves_the_page_of_the_parts_before_and_no_process(tmp_path):
    results, mark = tmp_path / "results", f"mark-{os.getpid()}-killed"
    command = [*COMMAND, "--only", "engines-4", "engines-2", "--output-dir", str(results)]
    environment = {**os.environ, "TMPDIR": str(tmp_path), OF_THIS_TEST: mark, "TORCHDYNAMO_DISABLE": "1"}
    with trio.fail_after(300):
        async with trio.open_nursery() as nursery:
            process = await nursery.start(partial(trio.run_process, command, cwd=ROOT, env=environment, check=False))
            # The run, the process that waits for its end, the launcher, and two processes that it has started.
            while not (results / "gpu.md").exists() or len(marked(mark, OF_THIS_TEST)) < 5:  # noqa: ASYNC110
                await trio.sleep(0.1)
            process.kill()
        while marked(mark, OF_THIS_TEST):  # noqa: ASYNC110
            await trio.sleep(0.1)
    assert list(tmp_path.iterdir()) == [results], "the models are removed"
    page = (results / "gpu.md").read_text()
    first, *_ = [load.aim.row for load in short_loads.ALL]
    (line,) = [line for line in page.splitlines() if line.startswith(f"| 4 engines: {first} ")]
    assert "not measured" not in line
    assert "Time-sliced, without MPS: there is no GPU." in page
    assert f"| 2 engines: {first} | engines-2 | ≥ 2,500,000 | – | not measured | the run ended before it |" in page
