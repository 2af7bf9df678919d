"""What the parts measure in processes of their own: on CPU with a tiny model, and from what a GPU's tools write."""

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
from benchmarks.gpu.part_process import PartProcessError, run_part_process
from benchmarks.gpu.settings import Settings
from benchmarks.servers import ROOT


@pytest.fixture
async def loaded(tmp_path):
    folder = write_bert(tmp_path / "bert", "tiny")
    arguments = [str(folder), "--device", "cpu", "--backend", "torch", "--max-batch-tokens", "1024"]
    loaded = await LoadedRunner.load(arguments)
    yield loaded
    loaded.offload.close()


async def test_a_launch_that_raises_is_found_with_where_it_was(loaded, monkeypatch):
    launch, broken = loaded.runner.launch, []

    def launch_once_wrongly(batch):
        if not broken:
            broken.append(batch)
            raise RuntimeError("called a synchronizing CUDA operation")
        return launch(batch)

    monkeypatch.setattr(type(loaded.runner), "launch", lambda _, batch: launch_once_wrongly(batch))
    (raised,) = await ordering.launch_all(loaded, in_this_thread=False)
    assert "called a synchronizing CUDA operation" in raised
    assert "launch_once_wrongly" in raised


def test_full_batches_are_those_that_the_queue_forms():
    padded, packed = full_batches(4096, pads=True), full_batches(4096, pads=False)
    equal, shortest, short, one_long, _ = packed
    assert packed[shortest] == [2] * 2048
    assert padded[equal] == packed[equal] == [MAX_TOKENS] * 8
    assert padded[short] == [SHORT] * 256
    assert padded[one_long] == [MAX_TOKENS], "padding of nine tenths is not computed"
    assert packed[one_long] == [MAX_TOKENS] + [SHORT] * 224, "no padding is computed"


def test_memory_over_time_is_what_the_allocator_has_given_and_got_back():
    happened = [
        ("segment_alloc", 1, 2 << 20), ("alloc", 1, 512), ("alloc", 2, 1024),
        ("free_requested", 1, 512), ("free_completed", 1, 512),
    ]  # fmt: skip
    events = [
        {"action": action, "addr": addr, "size": size, "stream": 0, "time_us": 1000 * at}
        for at, (action, addr, size) in enumerate(happened, 1)
    ]
    events.append({"action": "snapshot", "time_us": 6000})
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


def test_complaints_of_the_sanitizer_are_counted_but_for_the_one_on_purpose():
    """It writes about two accesses of one tensor, on streams that do not wait for each other."""
    handler, schema = EventHandler(), torch.ops.aten.add_.Tensor._schema
    handler._handle_memory_allocation(1)
    handler._handle_kernel_launch(0, set(), {1}, {1}, schema, {1: ["self"]})
    (error,) = handler._handle_kernel_launch(7, {1}, set(), set(), schema, {1: ["self"]})
    complaint, on_purpose = f"{error}\n", f"{ordering.ON_PURPOSE}\n"
    written = "".join(["warning\n", complaint, on_purpose, complaint, on_purpose, complaint])
    assert len(ordering.complaints_of(written)) == 2
    assert ordering.complaints_of(f"{on_purpose}{complaint}{on_purpose}") == []
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
    test_file.write_text("import no_such_module")
    findings = Findings()
    with pytest.raises(cuda_tests.TestsFailedError, match="no_such_module"):
        await cuda_tests.run(subject, findings)
    assert findings.values[cuda_tests.FAILED][0] is None


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
