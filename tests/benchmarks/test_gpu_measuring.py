"""What the parts measure in processes of their own: on CPU with a tiny model, and from what a GPU's tools write."""

import json
from pathlib import Path

import attrs
import pytest
import torch
import trio
from torch.cuda._sanitizer import EventHandler

from benchmarks.bert_shapes import write_bert
from benchmarks.gpu import cuda_tests, memory, ordering, overlap
from benchmarks.gpu.batch_stream import LAUNCH
from benchmarks.gpu.batches import MAX_TOKENS, SHORT, full_batches
from benchmarks.gpu.loaded_runner import LoadedRunner
from benchmarks.gpu.part import Findings, Subject
from benchmarks.gpu.part_process import FINDING, PartProcessError, run_part_process
from benchmarks.gpu.settings import Settings
from benchmarks.servers import ROOT


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_bert(tmp_path_factory.mktemp("tiny") / "bert", "tiny")


@pytest.fixture
async def loaded(folder):
    arguments = [str(folder), "--device", "cpu", "--backend", "torch", "--max-batch-tokens", "1024"]
    loaded = await LoadedRunner.load(arguments)
    yield loaded
    loaded.offload.close()


@pytest.fixture
def findings(capsysbinary):
    def read():
        found = {}
        for line in capsysbinary.readouterr().out.split(b"\n"):
            if line.startswith(FINDING):
                found |= json.loads(line.removeprefix(FINDING))
        return found

    return read


async def test_mixed_batches_are_launched_and_none_fails(loaded, findings):
    await ordering.check_waiting(loaded)
    await ordering.check_order(loaded)
    assert findings() == {"launched": 6 * ordering.ROUNDS, "waited": []}


async def test_a_launch_that_raises_is_found_with_where_it_was(loaded, findings, monkeypatch):
    launch, broken = loaded.runner.launch, []

    def launch_once_wrongly(batch):
        if not broken:
            broken.append(batch)
            raise RuntimeError("called a synchronizing CUDA operation")
        return launch(batch)

    monkeypatch.setattr(type(loaded.runner), "launch", lambda _, batch: launch_once_wrongly(batch))
    raised = await ordering.launch_all(loaded, in_this_thread=False)
    assert len(raised) == 1
    assert "called a synchronizing CUDA operation" in raised[0]
    assert "launch_once_wrongly" in raised[0]


async def test_the_memory_of_full_batches_is_measured_over_time(loaded, findings, tmp_path):
    await memory.measure(loaded, tmp_path / "snapshot.pickle")
    found = findings()
    peaks = {name: batch["peak_bytes"] for name, batch in found["batches"].items()}
    smallest = SHORT * 64 * 4
    assert all(peak > smallest for peak in peaks.values())
    assert next(iter(found["batches"].values()))["tokens"] == loaded.batch_tokens == 1024
    assert max(size for _, size in found["series"]) == max(peaks.values())
    assert found["logits_bytes"] == 0


async def test_both_ways_to_copy_are_measured_and_launches_are_traced(loaded, findings, tmp_path):
    await overlap.measure(loaded, rounds=2, seconds=0.01)
    await overlap.trace(loaded, tmp_path / "trace.json.gz")
    found = findings()
    assert set(found["ratios"]) == set(overlap.OUTPUTS)
    assert all(rate > 0 for rates in found["rates"].values() for rate in rates.values())
    assert [len(one["rounds"]) for one in found["results"]] == [2] * 4
    assert len(found["trace"]["launches"]) == overlap.TRACED_BATCHES
    overlap.draw(found["trace"], tmp_path)
    assert (tmp_path / "gpu_overlap.png").stat().st_size > 1000


def test_full_batches_are_those_that_the_queue_forms():
    padded, packed = full_batches(4096, pads=True), full_batches(4096, pads=False)
    equal, shortest, short, one_long, _ = packed
    assert packed[shortest] == [2] * 2048
    assert padded[equal] == packed[equal] == [MAX_TOKENS] * 8
    assert padded[short] == [SHORT] * 256
    assert padded[one_long] == [MAX_TOKENS], "padding of nine tenths is not computed"
    assert packed[one_long] == [MAX_TOKENS] + [SHORT] * 224, "no padding is computed"


def test_memory_over_time_is_what_the_allocator_has_given_and_got_back():
    events = [
        {"action": "segment_alloc", "addr": 1, "size": 2 << 20, "stream": 0, "time_us": 1000},
        {"action": "alloc", "addr": 1, "size": 512, "stream": 0, "time_us": 2000},
        {"action": "alloc", "addr": 2, "size": 1024, "stream": 0, "time_us": 3000},
        {"action": "free_requested", "addr": 1, "size": 512, "stream": 0, "time_us": 4000},
        {"action": "free_completed", "addr": 1, "size": 512, "stream": 0, "time_us": 5000},
        {"action": "snapshot", "time_us": 6000},
    ]
    assert memory.allocated(events) == [(2.0, 512), (3.0, 1536), (5.0, 1024)]
    assert len(memory.thinned([(float(at), 0.0) for at in range(1000)], most=100)) <= 100


def test_copies_and_kernels_are_found_in_a_trace():
    def event(category, name, at, duration):
        return {"ph": "X", "cat": category, "name": name, "ts": at * 1e3, "dur": duration * 1e3}

    events = [
        event("user_annotation", LAUNCH, 0, 1),
        event("gpu_user_annotation", LAUNCH, 1, 9),
        event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 1, 1),
        event("kernel", "gemm", 2, 3),
        event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 5, 2),
        event("cpu_op", "aten::mm", 0, 1),
        {"ph": "s", "cat": "ac2g", "name": "ac2g"},
    ]
    found = overlap.intervals(events)
    assert found == {"launches": [(0, 1)], "kernels": [(2, 5)], "copies": [(5, 7)]}


def test_a_copy_overlaps_if_a_kernel_runs_meanwhile():
    kernels = [(0, 5), (6, 9), (20, 25)]
    assert overlap.overlapped_share([(5, 7), (10, 11), (26, 27)], kernels) == 0.5
    assert overlap.overlapped_share([(5, 7), (9, 10)], kernels) == 1.0, "nothing follows the last one"
    assert overlap.overlapped_share([(5, 7)], kernels) is None
    assert overlap.overlapped_share([(5, 7), (9, 10)], []) is None


def unordered_access() -> str:
    """What the sanitizer writes about two accesses of one tensor, on streams that do not wait for each other."""
    handler, schema = EventHandler(), torch.ops.aten.add_.Tensor._schema
    handler._handle_memory_allocation(1)
    handler._handle_kernel_launch(0, set(), {1}, {1}, schema, {1: ["self"]})
    (error,) = handler._handle_kernel_launch(7, {1}, set(), set(), schema, {1: ["self"]})
    return f"{error}\n"


def test_complaints_of_the_sanitizer_are_counted_but_for_the_one_on_purpose():
    complaint = unordered_access()
    written = "".join(
        ["warning\n", complaint, ordering.ON_PURPOSE, "\n", complaint, ordering.ON_PURPOSE, "\n", complaint]
    )
    assert len(ordering.complaints_of(written)) == 2
    assert ordering.complaints_of(f"{ordering.ON_PURPOSE}\n{complaint}{ordering.ON_PURPOSE}\n") == []
    assert "aten::add_" in ordering.complaints_of(complaint)[0]


@pytest.mark.slow
async def test_a_process_that_dies_has_sent_what_it_had_found(tmp_path, monkeypatch):
    module = tmp_path / "dying.py"
    module.write_text(
        "from benchmarks.gpu.part_process import read_job, send_finding\n"
        "print('{\"printed\": 1}')\n"
        "send_finding({'asked': read_job()})\n"
        "raise MemoryError('too large')\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    found = {}
    with pytest.raises(PartProcessError, match="status 1: MemoryError: too large"):
        await run_part_process("dying", {"rows": 3}, found.update)
    assert found == {"asked": {"rows": 3}}


CUDA_TESTS = """
import threading
import pytest

pytestmark = getattr(pytest.mark, "cuda")

def test_one(): pass

@pytest.mark.parametrize("text", ["with a space"])
def test_two(text): assert 0

@pytest.mark.skip(reason="no GPU")
def test_three(): pass

@pytest.mark.slow
def test_four(): assert 0
"""

ENDLESS_TEST = """
def test_five(): threading.Event().wait()
"""


@pytest.fixture
def subject(tmp_path):
    settings = Settings(device="cpu", output_dir=tmp_path)
    return Subject(settings=settings, bert=tmp_path, splade=tmp_path)


@pytest.fixture
def test_file(tmp_path, monkeypatch):
    path = tmp_path / "test_some.py"
    path.write_text(CUDA_TESTS)
    monkeypatch.setattr(cuda_tests, "test_files", lambda: [str(path)])
    return path


@pytest.mark.slow
async def test_tests_that_failed_are_counted_and_named(subject, test_file):
    findings = Findings()
    await cuda_tests.run(subject, findings)
    value, note = findings.values[cuda_tests.FAILED]
    assert value == 1
    assert note.startswith("1 passed, 1 failed, 1 skipped")
    assert "test_two[with a space]" in findings.texts[0]


@pytest.mark.slow
async def test_tests_that_were_cut_off_have_not_passed(subject, test_file):
    test_file.write_text(CUDA_TESTS.replace("assert 0", "pass") + ENDLESS_TEST)
    findings = Findings()
    with trio.fail_after(120), trio.CancelScope() as scope:

        def cancel_after_the_third(step):
            if step.startswith("3"):
                scope.cancel()

        await cuda_tests.run(attrs.evolve(subject, note_step=cancel_after_the_third), findings)
    assert scope.cancelled_caught
    value, note = findings.values[cuda_tests.FAILED]
    assert value is None
    assert note.startswith("not all tests were run: 2 passed, 0 failed, 1 skipped")


@pytest.mark.slow
async def test_tests_that_cannot_be_collected_fail_the_part(subject, test_file):
    test_file.write_text("import no_such_module")
    findings = Findings()
    with pytest.raises(cuda_tests.TestsFailedError, match="no_such_module"):
        await cuda_tests.run(subject, findings)
    assert findings.values[cuda_tests.FAILED][0] is None


def test_the_files_with_tests_for_a_gpu_are_found():
    assert "tests/runner/test_cuda.py" in cuda_tests.test_files()
    assert "tests/runner/test_varlen.py" not in cuda_tests.test_files()
