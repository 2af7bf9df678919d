"""The simulated GPU finds what it is there to find, and computes what a CPU computes."""

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.simgpu.activity import Activity, SimulatedFaultError, watched
from tests.simgpu.device import MODULE, simulated_device


@pytest.fixture
def device() -> Iterator[torch.device]:
    with simulated_device() as found, torch.inference_mode():
        yield found


def pinned(*numbers: float) -> Tensor:
    made = torch.empty(len(numbers), pin_memory=True)
    made.copy_(torch.tensor(numbers))
    return made


def on(device: torch.device, *numbers: float) -> Tensor:
    return pinned(*numbers).to(device, non_blocking=True)


def asynchronous(activity: Activity) -> bool:
    try:
        activity.require_asynchronous()
    except SimulatedFaultError:
        return False
    return True


# -- waiting ----------------------------------------------------------------------------------------------

WAITS: dict[str, Callable[[Tensor], Any]] = {
    "item": lambda rows: rows.sum().item(),
    "truth": lambda rows: bool(rows.sum() > 0),
    "nonzero": lambda rows: rows.nonzero(),
    "boolean index": lambda rows: rows[rows > 1],
    "to the host": lambda rows: rows.cpu(),
    "a list": lambda rows: rows.tolist(),
    "repeat by numbers on the device": lambda rows: rows.repeat_interleave(rows.long()),
    "equal": lambda rows: torch.equal(rows, rows),
    "a number to the device": lambda rows: torch.tensor(2.0, device=rows.device),
    "pageable memory to the device": lambda rows: torch.ones(3).to(rows.device, non_blocking=True),
    "a blocking copy to the device": lambda rows: pinned(1.0).to(rows.device),
    "an index on the host": lambda rows: rows[torch.tensor([0])],
    "a list as an index": lambda rows: rows[[0, 1]],
    "a stream": lambda rows: MODULE.current_stream().synchronize(),
    "the device": lambda rows: MODULE.synchronize(),
}


@pytest.mark.parametrize("what", WAITS)
def test_what_waits_for_the_device_is_found(device: torch.device, what: str):
    rows = on(device, 1.0, 2.0)
    with watched() as activity:
        WAITS[what](rows)
    assert not asynchronous(activity)


def test_tensors_of_two_devices_are_refused(device: torch.device):
    with pytest.raises(RuntimeError, match="same device"):
        on(device, 1.0, 2.0) + torch.ones(2)
    with pytest.raises(RuntimeError, match="same device"):
        on(device, 1.0) + on(torch.device(device.type, 1), 1.0)


# -- order ------------------------------------------------------------------------------------------------


def copy_on_a_side_stream(rows: Tensor, *, waits: bool) -> tuple[Tensor, Any]:
    side, event = MODULE.Stream(), MODULE.Event()
    host = torch.empty(len(rows), pin_memory=True)
    if waits:
        side.wait_stream(MODULE.current_stream())
    with MODULE.stream(side):
        host.copy_(rows, non_blocking=True)
        event.record()
    return host, event


def test_a_copy_that_does_not_wait_is_found(device: torch.device):
    with watched() as activity:
        copy_on_a_side_stream(on(device, 1.0, 2.0) * 2, waits=False)
    assert any("UnsynchronizedAccess" in race for race in activity.races)


def test_the_host_sees_nothing_before_it_has_waited(device: torch.device):
    rows = on(device, 1.0, 2.0)
    host, event = copy_on_a_side_stream(rows, waits=True)
    assert host.isnan().all()
    event.synchronize()
    assert host.tolist() == [1.0, 2.0]


@pytest.mark.parametrize("protected", [True, False])
def test_memory_that_is_freed_while_another_stream_reads_it_is_found(device: torch.device, protected: bool):
    side = MODULE.Stream()
    with watched() as activity:
        rows = on(device, 1.0, 2.0) * 2
        side.wait_stream(MODULE.current_stream())
        with MODULE.stream(side):
            torch.empty(2, pin_memory=True).copy_(rows, non_blocking=True)
        if protected:
            rows.record_stream(side)
        del rows
        gc.collect()
    assert bool(activity.races) is not protected


def test_a_thread_of_another_device_that_waits_is_found(device: torch.device):
    with MODULE.device(torch.device(device.type, 1)):
        event = MODULE.Event()
        event.record()
    with watched() as activity:
        event.synchronize()
    assert activity.races == ["a thread of device 0 waits for device 1"]


# -- graphs -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["item", "a number to the device", "nonzero"])
def test_what_waits_cannot_be_captured(device: torch.device, what: str):
    rows, graph = on(device, 1.0), MODULE.CUDAGraph()
    with (
        pytest.raises(SimulatedFaultError, match="not permitted when stream is capturing"),
        MODULE.graph(graph, stream=MODULE.Stream(), capture_error_mode="thread_local"),
    ):
        WAITS[what](rows)
