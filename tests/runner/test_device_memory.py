"""Memory that does not suffice, as libraries report it when they really cannot get it."""

import gc
import weakref
from collections.abc import Callable

import numpy as np
import openvino as ov
import pytest
import torch
from attrs import evolve

from tests.models.model_families import load, write_family
from trio_pool_serve.errors import OutOfDeviceMemoryError, RunnerDeadError
from trio_pool_serve.runner.device_memory import is_out_of_memory
from trio_pool_serve.types import Batch, PoolingRequest, RenderedPrompt

MORE_THAN_THERE_IS = 2**50

ALLOCATIONS: dict[str, Callable[[], object]] = {
    "torch": lambda: torch.empty(MORE_THAN_THERE_IS, dtype=torch.uint8),
    "numpy": lambda: np.empty(MORE_THAN_THERE_IS, np.uint8),
    "openvino": lambda: ov.Tensor(ov.Type.u8, ov.Shape([MORE_THAN_THERE_IS])),
    "python": lambda: bytes(MORE_THAN_THERE_IS),
}


@pytest.mark.parametrize("allocate", ALLOCATIONS.values(), ids=ALLOCATIONS)
def test_allocations_that_fail_are_recognised(allocate):
    with pytest.raises((RuntimeError, MemoryError)) as caught:
        allocate()
    assert is_out_of_memory(caught.value)


TOLD = {
    "CUDA": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    "pinned memory": RuntimeError("CUDA error: out of memory"),
    "OpenVINO's kernel": RuntimeError(
        "Exception from node.cpp:794:\n[CPU] MatMul: Failed to allocate 64 bytes of memory"
    ),
}


OTHERS = [IndexError("index out of range in self"), RuntimeError("shapes differ"), OSError(12)]


def test_messages_of_devices_that_are_not_here_are_recognised_and_other_errors_are_not():
    assert [name for name, error in TOLD.items() if not is_out_of_memory(error)] == []
    assert [error for error in OTHERS if is_out_of_memory(error)] == []


BATCH = Batch((PoolingRequest(RenderedPrompt(np.array([5, 6], dtype=np.int32))),))


def test_a_runner_tells_it_as_one_error_and_keeps_nothing_of_the_pass(tmp_path):
    runner = load(write_family(tmp_path / "bert", "bert"))
    states: list[weakref.ref[torch.Tensor]] = []

    def run_out_of_memory(forward):
        output = runner.compute(forward)
        states.append(weakref.ref(output))
        torch.empty(MORE_THAN_THERE_IS, dtype=torch.uint8)

    failing = evolve(runner, compute=run_out_of_memory)
    gc.disable()  # reference counts alone must free it
    try:
        with pytest.raises(OutOfDeviceMemoryError, match="allocate") as caught:
            failing.launch(BATCH)
        assert states[0]() is None
        assert caught.value.__cause__ is caught.value.__context__ is None
    finally:
        gc.enable()
    assert runner.launch(BATCH).rows


def test_a_device_that_is_lost_is_something_else(tmp_path):
    runner = load(write_family(tmp_path / "bert", "bert"))

    def lose(_):
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    with pytest.raises(RunnerDeadError):
        evolve(runner, compute=lose).launch(BATCH)
