"""Copies to the host, on a simulated device where they end when the test says so."""

import gc
import threading
import weakref
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
import torch
import trio
from attrs import define, field
from torch import Tensor
from trio.testing import wait_all_tasks_blocked

from tests.simgpu.activity import watched
from tests.simgpu.device import DeviceModule, simulated_device
from tests.simgpu.streams import Event
from trio_pool_serve.errors import RunnerDeadError
from trio_pool_serve.runner.output_copy import OutputCopier
from trio_pool_serve.threads.offload import Offload
from trio_pool_serve.types import CopiedBatch, PooledBatch, PooledValue, Vectors

PATIENCE_S = 60
"""After which a test that would hang fails instead."""


class HeldEvent(Event):
    """An event that fires when ``fire`` is called; the copy that it marks ends then, with ``error`` if there is one."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.stream: Any = None
        self.error: Exception | None = None
        self.awaited = threading.Event()
        """Set once a thread waits for the copy."""
        self._fired = threading.Event()

    def record(self, stream: Any) -> None:
        super().record(stream)
        self.stream = stream

    def synchronize(self) -> None:
        self.awaited.set()
        assert self._fired.wait(PATIENCE_S)
        if self.error is not None:
            raise self.error
        super().synchronize()

    def fire(self) -> None:
        self._fired.set()


@define(eq=False)
class HeldDevice:
    """The simulated device, where copies end when the test says so."""

    device: torch.device
    events: list[HeldEvent] = field(factory=list)
    """Of the copies, in the order in which they began."""

    def open_event(self, **options: Any) -> HeldEvent:
        self.events.append(HeldEvent(**options))
        return self.events[-1]


def split_rows(arrays: Sequence[Vectors]) -> list[tuple[PooledValue, ...]]:
    """Each row of the one array that was copied."""
    (array,) = arrays
    return [(row,) for row in array]


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[HeldDevice]:
    with simulated_device() as device:
        held = HeldDevice(device)
        monkeypatch.setattr(DeviceModule, "Event", staticmethod(held.open_event))
        yield held


@pytest.fixture
def offload() -> Offload:
    """One copy thread, so that running something else there tells that it is free."""
    return Offload(copy=1)


@pytest.fixture
def copier(held: HeldDevice, offload: Offload) -> OutputCopier:
    return OutputCopier(held.device, offload)


async def happens(event: threading.Event) -> None:
    assert await trio.to_thread.run_sync(event.wait, PATIENCE_S)


async def copy_thread_is_free(offload: Offload) -> None:
    await offload.run("copy", lambda: None)


async def wait_for(handle: PooledBatch) -> None:
    await handle


def started(copier: OutputCopier, shape: tuple[int, int] = (2, 3)) -> tuple[PooledBatch, "weakref.ref[Tensor]"]:
    """Start a copy of rows that only the copy keeps alive."""
    rows = torch.arange(float(shape[0] * shape[1]), device=copier.device).reshape(shape) * 2
    return copier.start([rows], split_rows), weakref.ref(rows)


def is_alive(ref: "weakref.ref[Tensor]") -> bool:
    gc.collect()
    return ref() is not None


# -- order --------------------------------------------------------------------------------------------------


def test_copies_wait_for_the_compute_before_them_and_nothing_else_does(copier: OutputCopier, held: HeldDevice):
    """The simulator would find a copy that is not ordered, and one or an allocation that the host waits for."""
    with watched() as activity:
        handles = [started(copier)[0] for _ in range(3)]
    activity.require_asynchronous()
    assert activity.copies_to_host == len(handles)
    (stream,) = {event.stream for event in held.events}
    assert stream is not DeviceModule.current_stream()
    assert all(event.blocking for event in held.events)
    assert not held.events[0].awaited.is_set()


def test_memory_is_not_used_again_before_it_is_copied(copier: OutputCopier, held: HeldDevice):
    """The simulator would find memory that is freed while a copy reads it."""
    with watched() as activity:
        handle, rows = started(copier)
        assert is_alive(rows)
        del handle
        assert not is_alive(rows)
    assert activity.races == []


# -- rows ---------------------------------------------------------------------------------------------------


async def test_awaiting_gives_what_is_made_of_all_tensors(copier: OutputCopier, held: HeldDevice):
    threads = []

    def split(arrays: Sequence[Vectors]) -> list[tuple[Vectors, ...]]:
        threads.append(threading.get_ident())
        return [tuple(rows) for rows in zip(*arrays, strict=True)]

    tensors = [torch.tensor([[1.0, 2.0], [4.0, 5.0]]), torch.tensor([[7.0], [8.0]])]
    handle = copier.start([tensor.to(held.device) for tensor in tensors], split)
    held.events[0].fire()
    assert [[value.tolist() for value in row] for row in await handle] == [[[1, 2], [7]], [[4, 5], [8]]]
    assert threads != [threading.get_ident()], "not on the loop"


async def test_a_batch_that_is_on_the_host_is_awaited_without_waiting():
    rows: list[tuple[PooledValue, ...]] = [(np.ones(2, dtype=np.float32),)]
    assert await CopiedBatch(rows) is rows


# -- the lifetime of the device's rows ------------------------------------------------------------------------


@asynccontextmanager
async def waiting(handle: PooledBatch, held: HeldDevice) -> AsyncIterator[trio.Nursery]:
    """Wait for a handle in a child; the block runs once a thread waits for the first event."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait_for, handle)
        await happens(held.events[0].awaited)
        yield nursery


async def test_device_rows_live_until_the_event_has_fired_and_no_longer(copier: OutputCopier, held: HeldDevice):
    handle, rows = started(copier)
    assert is_alive(rows)
    async with waiting(handle, held) as nursery:
        assert is_alive(rows)
        assert len(nursery.child_tasks) == 1, "it does not return before the event has fired"
        held.events[0].fire()
    assert not is_alive(rows)


async def test_a_cancelled_waiter_leaves_and_its_thread_keeps_token_and_rows_until_the_event_has_fired(
    copier: OutputCopier, held: HeldDevice, offload: Offload
):
    handle, rows = started(copier)
    async with waiting(handle, held) as nursery:
        nursery.cancel_scope.cancel()
    del handle
    assert is_alive(rows)
    assert offload.statistics()["copy"].borrowed == 1
    held.events[0].fire()
    await copy_thread_is_free(offload)
    assert not is_alive(rows)
    assert offload.statistics()["copy"].borrowed == 0


@pytest.mark.parametrize(
    ("error", "told"),
    [(RuntimeError, RuntimeError), (torch.AcceleratorError, RunnerDeadError)],
)
async def test_an_error_of_the_event_is_raised_and_the_device_rows_are_freed(
    copier: OutputCopier, held: HeldDevice, error: type[Exception], told: type[Exception]
):
    handle, rows = started(copier)
    held.events[0].error = error("the copy failed")
    held.events[0].fire()
    with pytest.raises(told, match="the copy failed"):
        await handle
    assert not is_alive(rows)


async def test_a_waiter_cancelled_while_it_waits_for_a_thread_leaves_at_once(
    copier: OutputCopier, held: HeldDevice, offload: Offload
):
    first, _ = started(copier)
    second, _ = started(copier)
    async with waiting(first, held):
        async with trio.open_nursery() as inner:
            inner.start_soon(wait_for, second)
            await wait_all_tasks_blocked()
            assert offload.statistics()["copy"].waiting == 1
            inner.cancel_scope.cancel()
        assert offload.statistics()["copy"].waiting == 0
        assert not held.events[1].awaited.is_set()
        held.events[0].fire()
