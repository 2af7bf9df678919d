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

from tests.scripted_runner import ScriptedRunner
from tests.simgpu.activity import watched
from tests.simgpu.device import DeviceModule, simulated_device
from tests.simgpu.streams import Event
from trio_pool_serve.engine import worker
from trio_pool_serve.engine.engine import Engine
from trio_pool_serve.engine.worker import Worker
from trio_pool_serve.errors import BatchFailedError, EngineDeadError, RunnerDeadError
from trio_pool_serve.runner.output_copy import OutputCopier
from trio_pool_serve.telemetry.metrics import Metrics
from trio_pool_serve.threads.offload import Offload
from trio_pool_serve.types import Batch, CopiedBatch, PooledBatch, PooledValue, PoolingRequest, RenderedPrompt, Vectors

PATIENCE_S = 60
"""After which a test that would hang fails instead."""


class HeldEvent(Event):
    """An event that fires when ``fire`` is called; the copy that it marks ends then, with ``error`` if there is one."""

    def __init__(self, name: str, trace: list[str], **options: Any) -> None:
        super().__init__(**options)
        self.name = name
        self.trace = trace
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
        self.trace.append(f"{self.name} fires")
        self._fired.set()


@define(eq=False)
class HeldDevice:
    """The simulated device, where copies end when the test says so."""

    device: torch.device
    trace: list[str] = field(factory=list)
    events: list[HeldEvent] = field(factory=list)
    """Of the copies, in the order in which they began."""

    def open_event(self, **options: Any) -> HeldEvent:
        self.events.append(HeldEvent(f"event {len(self.events)}", self.trace, **options))
        return self.events[-1]


def split_rows(arrays: Sequence[Vectors]) -> list[tuple[PooledValue, ...]]:
    """Each row of the one array that was copied."""
    (array,) = arrays
    return [(row,) for row in array]


@define(eq=False)
class CopyingRunner(ScriptedRunner):
    """Answers each row with its length and its first id, through a copier."""

    copier: OutputCopier = field(kw_only=True)
    trace: list[str] = field(kw_only=True)
    launched: list[threading.Event] = field(factory=lambda: [threading.Event() for _ in range(4)])
    """One for each of the first launches, set when it has returned."""
    copied: list["weakref.ref[Tensor]"] = field(factory=list)

    def launch(self, batch: Batch) -> PooledBatch:
        index = len(self.copied)
        self.trace.append(f"launch {index}")
        numbers = [[request.tokens, request.prompt.token_ids[0]] for request in batch.requests]
        rows = torch.tensor(numbers).float().to(self.copier.device)
        self.copied.append(weakref.ref(rows))
        handle = self.copier.start([rows], split_rows)
        self.launched[index].set()
        return handle


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


def test_nothing_is_opened_before_the_first_copy(copier: OutputCopier, held: HeldDevice):
    assert copier._stream is None
    assert held.events == []


def test_copies_wait_for_the_compute_before_them_and_nothing_else_does(copier: OutputCopier, held: HeldDevice):
    """The simulator would find a copy that is not ordered, and one or an allocation that the host waits for."""
    with watched() as activity:
        handles = [started(copier)[0] for _ in range(3)]
    activity.require_asynchronous()
    assert activity.copies_to_host == len(handles)


def test_memory_is_not_used_again_before_it_is_copied(copier: OutputCopier, held: HeldDevice):
    """The simulator would find memory that is freed while a copy reads it."""
    with watched() as activity:
        handle, rows = started(copier)
        del handle
        assert not is_alive(rows)
    assert activity.races == []


def test_all_copies_share_one_stream_and_have_events_of_their_own(copier: OutputCopier, held: HeldDevice):
    for _ in range(3):
        started(copier)
    (stream,) = {event.stream for event in held.events}
    assert stream is not DeviceModule.current_stream()
    assert len(held.events) == 3
    assert all(event.blocking for event in held.events)


def test_starting_a_copy_does_not_wait_for_it(copier: OutputCopier, held: HeldDevice):
    started(copier)
    assert not held.events[0].awaited.is_set()


# -- rows ---------------------------------------------------------------------------------------------------


async def test_awaiting_gives_what_is_made_of_all_tensors(copier: OutputCopier, held: HeldDevice):
    def split(arrays: Sequence[Vectors]) -> list[tuple[Vectors, ...]]:
        return [tuple(rows) for rows in zip(*arrays, strict=True)]

    tensors = [torch.tensor([[1.0, 2.0], [4.0, 5.0]]), torch.tensor([[7.0], [8.0]])]
    handle = copier.start([tensor.to(held.device) for tensor in tensors], split)
    held.events[0].fire()
    assert [[value.tolist() for value in row] for row in await handle] == [[[1, 2], [7]], [[4, 5], [8]]]


async def test_taking_rows_apart_is_not_done_on_the_loop(copier: OutputCopier, held: HeldDevice):
    threads = []

    def split(arrays: Sequence[Vectors]) -> list[tuple[Vectors, ...]]:
        threads.append(threading.get_ident())
        return split_rows(arrays)

    handle = copier.start([torch.ones(1, 2, device=held.device)], split)
    held.events[0].fire()
    await handle
    assert threads != [threading.get_ident()]


async def test_awaiting_does_not_return_before_the_event_has_fired(copier: OutputCopier, held: HeldDevice):
    handle, _ = started(copier)
    async with waiting(handle, held) as nursery:
        assert len(nursery.child_tasks) == 1
        held.events[0].fire()


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
    async with waiting(handle, held):
        assert is_alive(rows)
        held.events[0].fire()
    assert not is_alive(rows)


async def test_a_handle_that_is_never_awaited_keeps_the_rows_as_long_as_itself(copier: OutputCopier):
    handle, rows = started(copier)
    assert is_alive(rows)
    del handle
    assert not is_alive(rows)


async def test_a_cancelled_waiter_leaves_and_its_thread_keeps_token_and_rows_until_the_event_has_fired(
    copier: OutputCopier, held: HeldDevice, offload: Offload
):
    handle, rows = started(copier)
    async with waiting(handle, held) as nursery:
        nursery.cancel_scope.cancel()
    assert "event 0 fires" not in held.trace
    del handle
    assert is_alive(rows)
    assert offload.statistics()["copy"].borrowed == 1
    held.events[0].fire()
    await copy_thread_is_free(offload)
    assert not is_alive(rows)
    assert offload.statistics()["copy"].borrowed == 0


async def test_device_rows_are_freed_when_the_event_raises(copier: OutputCopier, held: HeldDevice):
    handle, rows = started(copier)
    held.events[0].error = RuntimeError("the copy failed")
    held.events[0].fire()
    with pytest.raises(RuntimeError, match="the copy failed"):
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


# -- under an engine ----------------------------------------------------------------------------------------


@define(eq=False)
class Stage:
    """An engine over a ``CopyingRunner``, and who waits for what."""

    engine: Engine
    runner: CopyingRunner
    held: HeldDevice
    offload: Offload
    nursery: trio.Nursery
    answers: dict[str, list[float]] = field(factory=dict)
    errors: dict[str, Exception] = field(factory=dict)
    settled: dict[str, trio.Event] = field(factory=dict)
    """Set for each name once it is in ``answers`` or ``errors``."""

    def submit(self, name: str, tokens: int) -> None:
        """Have a child ask for one row of ``tokens`` tokens, all of them 7."""
        self.settled[name] = trio.Event()
        self.nursery.start_soon(self._submit, name, tokens)

    async def _submit(self, name: str, tokens: int) -> None:
        try:
            output = await self.engine.submit(PoolingRequest(RenderedPrompt(np.full(tokens, 7, dtype=np.int32))))
        except Exception as error:
            self.errors[name] = error
        else:
            self.answers[name] = output.values[0].tolist()
        self.settled[name].set()

    async def submit_and_copy(self, *names: str) -> None:
        """Submit a row of 3 tokens, one of 4 and so on, each once the one before is being copied."""
        for index, name in enumerate(names):
            self.submit(name, 3 + index)
            await self.copying(index)

    async def copying(self, index: int) -> None:
        """Wait until a thread waits for the copy of launch ``index``."""
        await happens(self.runner.launched[index])
        await happens(self.held.events[index].awaited)


@asynccontextmanager
async def staged(held: HeldDevice, max_in_flight: int) -> AsyncIterator[Stage]:
    """Run an engine while the block runs, then until all its children have answers."""
    offload = Offload(copy=max_in_flight)
    runner = CopyingRunner(copier=OutputCopier(held.device, offload), trace=held.trace)
    engine = Engine(Worker(lambda: runner, offload, Metrics().of_engine("m")))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker, "MAX_IN_FLIGHT", max_in_flight)
        async with trio.open_nursery() as nursery:
            await nursery.start(engine.run)
            await engine.wait_ready()
            async with trio.open_nursery() as waiters:
                yield Stage(engine, runner, held, offload, waiters)
            nursery.cancel_scope.cancel()


async def test_the_next_batch_is_launched_while_the_copy_before_it_runs_and_may_end_before_it(held: HeldDevice):
    async with staged(held, max_in_flight=2) as stage:
        await stage.submit_and_copy("a", "b")
        held.events[1].fire()
        await stage.settled["b"].wait()
        assert "a" not in stage.answers
        held.events[0].fire()
    assert held.trace == ["launch 0", "launch 1", "event 1 fires", "event 0 fires"]
    assert stage.answers == {"a": [3, 7], "b": [4, 7]}


@pytest.mark.parametrize("max_in_flight", [1, 2])
async def test_no_more_batches_are_in_flight_than_allowed_and_rows_that_wait_are_one_batch(
    held: HeldDevice, max_in_flight: int
):
    async with staged(held, max_in_flight) as stage:
        await stage.submit_and_copy(*"ab"[:max_in_flight])
        for name in "wxy":
            stage.submit(name, 4)
        await wait_all_tasks_blocked()
        assert stage.engine.statistics().queued_rows == 3
        assert stage.engine.statistics().in_flight_batches == max_in_flight
        assert stage.offload.statistics()["launch"].borrowed == 0
        held.events[0].fire()
        await stage.copying(max_in_flight)
        for event in held.events[1:]:
            event.fire()
    assert held.trace.index("event 0 fires") + 1 == held.trace.index(f"launch {max_in_flight}")
    assert len(stage.runner.copied) == max_in_flight + 1
    assert [stage.answers[name] for name in "wxy"] == [[4, 7]] * 3


async def test_the_engine_keeps_no_device_rows_of_answered_batches(held: HeldDevice):
    async with staged(held, max_in_flight=2) as stage:
        await stage.submit_and_copy("a")
        assert is_alive(stage.runner.copied[0])
        held.events[0].fire()
    assert not is_alive(stage.runner.copied[0])


async def test_an_error_from_an_event_fails_its_own_batch_only(held: HeldDevice, caplog: pytest.LogCaptureFixture):
    async with staged(held, max_in_flight=2) as stage:
        await stage.submit_and_copy("a", "b")
        held.events[0].error = RuntimeError("the copy failed")
        held.events[0].fire()
        await stage.settled["a"].wait()
        assert stage.engine.statistics().state == "ready"
        stage.submit("c", 5)
        await stage.copying(2)
        for event in held.events[1:]:
            event.fire()
    assert isinstance(stage.errors["a"], BatchFailedError)
    assert stage.answers == {"b": [4, 7], "c": [5, 7]}
    assert "the copy failed" in caplog.text


@pytest.mark.parametrize("error", [RunnerDeadError("the device is gone"), torch.AcceleratorError("illegal address")])
async def test_a_dead_device_found_by_an_event_kills_the_engine(held: HeldDevice, error: Exception):
    with pytest.RaisesGroup(pytest.RaisesExc(EngineDeadError, match=str(error))):
        async with staged(held, max_in_flight=2) as stage:
            await stage.submit_and_copy("copying", "in flight")
            stage.submit("queued", 5)
            await wait_all_tasks_blocked()
            held.events[0].error = error
            held.events[0].fire()
    assert stage.engine.statistics().state == "dead"
    assert {name: type(error) for name, error in stage.errors.items()} == dict.fromkeys(
        ("copying", "in flight", "queued"), EngineDeadError
    )
    held.events[1].fire()


async def test_a_stopped_engine_leaves_its_copies_to_their_threads(held: HeldDevice):
    async with staged(held, max_in_flight=1) as stage:
        await stage.submit_and_copy("a")
        stage.nursery.cancel_scope.cancel()
    assert is_alive(stage.runner.copied[0])
    assert stage.offload.statistics()["copy"].borrowed == 1
    held.events[0].fire()
    await copy_thread_is_free(stage.offload)
    assert not is_alive(stage.runner.copied[0])
