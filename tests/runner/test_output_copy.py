"""Copies to the host, on a simulated device where they end when the test says so."""

import gc
import threading
import weakref
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
import torch
import trio
from torch import Tensor

from tests.simgpu.activity import watched
from tests.simgpu.device import DeviceModule, simulated_device
from tests.simgpu.sim_tensor import NAME
from tests.simgpu.streams import Event
from trio_pool_serve.errors import RunnerDeadError
from trio_pool_serve.runner.output_copy import OutputCopier
from trio_pool_serve.threads.offload import Offload
from trio_pool_serve.types import PooledBatch, PooledValue, Vectors

PATIENCE_S = 60
"""After which a test that would hang fails instead."""


class HeldEvent(Event):
    """An event that fires when ``fired`` is set; the copy that it marks ends then, with ``error`` if there is one."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.stream: Any = None
        self.error: Exception | None = None
        self.awaited = threading.Event()
        """Set once a thread waits for the copy."""
        self.fired = threading.Event()

    def record(self, stream: Any) -> None:
        super().record(stream)
        self.stream = stream

    def synchronize(self) -> None:
        self.awaited.set()
        assert self.fired.wait(PATIENCE_S)
        if self.error is not None:
            raise self.error
        super().synchronize()


def split_rows(arrays: Sequence[Vectors]) -> list[tuple[PooledValue, ...]]:
    """Each row of the one array that was copied."""
    (array,) = arrays
    return [(row,) for row in array]


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[HeldEvent]]:
    """The events of the copies to the host, in the order in which the copies begin."""
    opened: list[HeldEvent] = []

    def open_event(**options: Any) -> HeldEvent:
        opened.append(HeldEvent(**options))
        return opened[-1]

    with simulated_device():
        monkeypatch.setattr(DeviceModule, "Event", staticmethod(open_event))
        yield opened


@pytest.fixture
def offload() -> Offload:
    """One copy thread, so that running something else there tells that it is free."""
    return Offload(copy=1)


@pytest.fixture
def copier(events: list[HeldEvent], offload: Offload) -> OutputCopier:
    return OutputCopier(torch.device(NAME, 0), offload)


async def wait_for(handle: PooledBatch) -> None:
    await handle


def started(copier: OutputCopier) -> tuple[PooledBatch, "weakref.ref[Tensor]"]:
    """Start a copy of rows that only the copy keeps alive."""
    rows = torch.arange(6.0, device=copier.device).reshape(2, 3) * 2
    return copier.start([rows], split_rows), weakref.ref(rows)


def is_alive(ref: "weakref.ref[Tensor]") -> bool:
    gc.collect()
    return ref() is not None


# -- order --------------------------------------------------------------------------------------------------


def test_copies_wait_for_the_compute_before_them_and_nothing_else_does(copier: OutputCopier, events: list[HeldEvent]):
    """The simulator would find a copy that is not ordered, and one or an allocation that the host waits for."""
    with watched() as activity:
        handles = [started(copier)[0] for _ in range(3)]
    activity.require_asynchronous()
    assert activity.copies_to_host == len(handles)
    (stream,) = {event.stream for event in events}
    assert stream is not DeviceModule.current_stream()
    assert all(event.blocking for event in events)
    assert not events[0].awaited.is_set()


def test_memory_is_not_used_again_before_it_is_copied(copier: OutputCopier, events: list[HeldEvent]):
    """The simulator would find memory that is freed while a copy reads it."""
    with watched() as activity:
        handle, rows = started(copier)
        assert is_alive(rows)
        del handle
        assert not is_alive(rows)
    assert activity.races == []


# -- rows ---------------------------------------------------------------------------------------------------


async def test_awaiting_gives_what_is_made_of_all_tensors(copier: OutputCopier, events: list[HeldEvent]):
    threads = []

    def split(arrays: Sequence[Vectors]) -> list[tuple[Vectors, ...]]:
        threads.append(threading.get_ident())
        return [tuple(rows) for rows in zip(*arrays, strict=True)]

    tensors = [torch.tensor([[1.0, 2.0], [4.0, 5.0]]), torch.tensor([[7.0], [8.0]])]
    handle = copier.start([tensor.to(copier.device) for tensor in tensors], split)
    events[0].fired.set()
    assert [[value.tolist() for value in row] for row in await handle] == [[[1, 2], [7]], [[4, 5], [8]]]
    assert threads != [threading.get_ident()], "not on the loop"


# -- the lifetime of the device's rows ------------------------------------------------------------------------


@asynccontextmanager
async def waiting(handle: PooledBatch, events: list[HeldEvent]) -> AsyncIterator[trio.Nursery]:
    """Wait for a handle in a child; the block runs once a thread waits for the first event."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait_for, handle)
        assert await trio.to_thread.run_sync(events[0].awaited.wait, PATIENCE_S)
        yield nursery


async def test_device_rows_live_until_the_event_has_fired_and_no_longer(copier: OutputCopier, events: list[HeldEvent]):
    handle, rows = started(copier)
    assert is_alive(rows)
    async with waiting(handle, events) as nursery:
        assert is_alive(rows)
        assert len(nursery.child_tasks) == 1, "it does not return before the event has fired"
        events[0].fired.set()
    assert not is_alive(rows)


async def test_a_cancelled_waiter_leaves_and_its_thread_keeps_the_rows_until_the_event_has_fired(
    copier: OutputCopier, events: list[HeldEvent], offload: Offload
):
    handle, rows = started(copier)
    async with waiting(handle, events) as nursery:
        nursery.cancel_scope.cancel()
    del handle
    assert is_alive(rows)
    events[0].fired.set()
    await offload.run("copy", lambda: None)  # once the thread is free
    assert not is_alive(rows)


@pytest.mark.parametrize(
    ("error", "told"),
    [(RuntimeError, RuntimeError), (torch.AcceleratorError, RunnerDeadError)],
)
async def test_an_error_of_the_event_is_raised_and_the_device_rows_are_freed(
    copier: OutputCopier, events: list[HeldEvent], error: type[Exception], told: type[Exception]
):
    handle, rows = started(copier)
    events[0].error = error("the copy failed")
    events[0].fired.set()
    with pytest.raises(told, match="the copy failed"):
        await handle
    assert not is_alive(rows)
