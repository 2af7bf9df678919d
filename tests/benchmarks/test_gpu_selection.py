"""The GPU that nvidia-smi is asked about is the one that computes."""

import os
from datetime import datetime

import attrs
import pytest
import trio

from benchmarks.gpu.busy_share import BusyShare, watch
from benchmarks.gpu.selected_gpu import NoGpuError, SelectedGpu, nvidia_smi_id, visible_id

UUID = "3f2a7c11-8f0e-4d3b-9a52-0c6d1e2f3a4b"
GPU = SelectedGpu(name="a GPU", nvidia_smi_id="0", memory_gib=80.0, capability="9.0", multiprocessors=132, cuda="13.0")


@pytest.mark.parametrize(
    ("device", "visible", "expected"),
    [
        ("cuda", None, "0"),
        ("cuda:2", None, "2"),
        ("cuda", "3", "3"),
        ("cuda:1", "3,1", "1"),
        ("cuda:1", " 3 , 1 ", "1"),
        ("cuda:0", f"GPU-{UUID},2", f"GPU-{UUID}"),
        ("cuda:1", f"0,MIG-{UUID}", f"MIG-{UUID}"),
        *((device, visible, None) for device, visible in (("cuda", ""), ("cuda:1", "3"), ("cuda:1", "0,-1,1"))),
        ("cuda", "-1", None),
    ],
)
def test_a_device_is_the_one_that_is_visible_at_its_place(device, visible, expected):
    if expected is None:
        with pytest.raises(NoGpuError, match="CUDA_VISIBLE_DEVICES"):
            visible_id(device, visible)
    else:
        assert visible_id(device, visible) == expected


def test_nvidia_smi_is_asked_by_the_uuid_that_torch_knows():
    assert nvidia_smi_id("cuda", UUID, "3") == f"GPU-{UUID}"
    assert nvidia_smi_id("cuda", f"GPU-{UUID}", None) == f"GPU-{UUID}"
    assert nvidia_smi_id("cuda:1", "", "3,2") == "2"
    assert nvidia_smi_id("cuda", UUID, f"MIG-{UUID[::-1]}") == f"MIG-{UUID[::-1]}", "the UUID is the whole GPU's"


def test_the_busy_share_is_that_of_the_time_between():
    busy = BusyShare()
    at = [f"2026/07/05 12:00:0{second}.250" for second in range(4)]
    for moment, share in zip(at, ("0", "90", "100", "5"), strict=True):
        busy.add(f"{moment}, {share}")
    begin = datetime(2026, 7, 5, 12, 0, 1).timestamp()
    assert busy.between(begin, begin + 2) == 95
    assert busy.between(begin + 10, begin + 20) is None
    assert not busy.problem
    busy.add(f"{at[0]}, [N/A]")
    assert "[N/A]" in busy.problem


async def test_without_nvidia_smi_there_is_no_busy_share(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    async with watch(GPU) as busy:
        pass
    assert busy.samples == []
    assert "nvidia-smi" in busy.problem


async def test_samples_are_those_of_the_selected_gpu(monkeypatch, tmp_path):
    """A program in place of nvidia-smi writes its arguments where the share is."""
    program = tmp_path / "nvidia-smi"
    program.write_text('#!/bin/sh\necho "2026/07/05 12:00:00.000, $*"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with trio.fail_after(30):
        async with watch(attrs.evolve(GPU, nvidia_smi_id=f"GPU-{UUID}")) as busy:
            while not busy.problem:
                await trio.lowlevel.checkpoint()
    assert f"-i GPU-{UUID} " in busy.problem
