"""Rows of device servers that are lost: which are computed by others."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest
import trio
from attrs import define, field

from tests.engine.engines import compute_window
from tests.engine.remote.replicas import Replica, asking, frame_of, request, until
from trio_pool_serve.engine.engine import Engine
from trio_pool_serve.engine.queue_entry import QueueEntry
from trio_pool_serve.engine.refused_rows import REFUSAL
from trio_pool_serve.engine.remote.remote_device import RemoteDevice
from trio_pool_serve.engine.remote.wire import Hello
from trio_pool_serve.errors import EngineProcessDiedError
from trio_pool_serve.types import PoolingOutput, PoolingRequest


@define(eq=False)
class Devices:
    """Device servers that can be lost one by one, and the engine that gives them batches."""

    replicas: Sequence[Replica]
    engine: Engine
    ends: list[trio.Event] = field(factory=list)

    async def lose(self, index: int) -> None:
        """Lose one, and wait until the engine has noticed."""
        self.ends[index].set()
        await until(lambda: self.engine.worker.links[index].hello is None)

    async def lose_holder(self) -> None:
        """Lose the only one that computes a batch, once it does."""
        await until(lambda: any(replica.engine.worker.statistics().in_flight_batches for replica in self.replicas))
        (holder,) = [index for index, device in enumerate(self.engine.worker.links) if device.in_flight]
        await self.lose(holder)

    def let(self, *indices: int) -> None:
        """Have only these get rows."""
        for index, device in enumerate(self.engine.worker.links):
            device.is_draining = index not in indices
        self.engine.dispatcher.note_room()


@pytest.fixture
def devices(make):
    @asynccontextmanager
    async def devices(count: int) -> AsyncIterator[Devices]:
        """Have ``count`` device servers that compute nothing before their gates are set."""
        replicas = [make(number) for number in range(count)]

        async def live(replica: Replica, end: trio.Event, task_status: trio.TaskStatus[None]) -> None:
            async with replica.listen(), replica.live():
                task_status.started()
                await end.wait()

        async with trio.open_nursery() as nursery:
            ends = [trio.Event() for _ in replicas]
            for replica, end in zip(replicas, ends, strict=True):
                replica.runner.gate.clear()
                await nursery.start(live, replica, end)
            async with asking(*replicas) as engine:
                await until(lambda: len(engine.dispatcher.devices) == count)
                yield Devices(replicas, engine, ends)
            nursery.cancel_scope.cancel()

    return devices


def submit(engine: Engine, *asked: PoolingRequest) -> list[QueueEntry]:
    """Submit rows at once, so that they are of one batch."""
    entries = [QueueEntry(each) for each in asked]
    engine.submit_nowait(*entries)
    return entries


async def settled(entries: Sequence[QueueEntry]) -> list[PoolingOutput | Exception | None]:
    await until(lambda: all(entry.is_settled for entry in entries))
    return [entry.output or entry.error for entry in entries]


async def test_rows_of_a_lost_device_are_computed_by_another_each_alone(devices):
    async with devices(2) as two:
        two.let(0)
        entries = submit(two.engine, *[request(index) for index in range(5)])
        await until(lambda: two.replicas[0].runner.rows == [5])
        two.let(0, 1)
        await two.lose(0)
        two.replicas[1].runner.gate.set()
        assert [output.values[0][1] for output in await settled(entries)] == list(range(5))
        assert two.replicas[1].runner.rows == [1] * 5


async def test_the_neighbours_of_a_row_that_kills_are_computed(devices):
    async with devices(3) as three:
        three.let(0)
        entries = submit(three.engine, *[request(index) for index in range(4)])
        await until(lambda: three.replicas[0].runner.rows == [4])
        three.let(1)
        await three.lose(0)
        await until(lambda: three.replicas[1].runner.rows == [1])
        three.let(2)
        await three.lose(1)
        three.replicas[2].runner.gate.set()
        refused, *computed = await settled(entries)
        assert str(refused) == REFUSAL
        assert [output.values[0][1] for output in computed] == [1, 2, 3]
        assert three.replicas[2].runner.rows == [1] * 3


async def test_rows_of_a_planned_batch_fail_at_once(devices):
    """They are computed in exactly that batch, and the run submits it again."""
    async with devices(2) as two, trio.open_nursery() as nursery:
        found = []

        async def ask() -> None:
            found.extend(await compute_window(two.engine, [request(5), request(6)]))

        nursery.start_soon(ask)
        await two.lose_holder()
        await until(lambda: found)
        assert isinstance(found[0], EngineProcessDiedError)


async def test_planned_batches_that_wait_fail_with_the_last_device_and_later_ones_are_computed(make):
    replica = make()
    found = []

    async def ask(engine) -> None:
        found.extend(await compute_window(engine, *[[request(*range(1, 17))] for _ in range(4)]))

    async with replica.listen(), asking(replica) as engine, trio.open_nursery() as nursery:
        async with replica.live():
            await engine.wait_ready()
            replica.runner.gate.clear()
            nursery.start_soon(ask, engine)
            await until(lambda: len([*engine.scheduler.planned]) == 3)
            await until(lambda: replica.runner.batches)
        await until(lambda: found)
        assert [type(outcome) for outcome in found] == [EngineProcessDiedError] * 4
        assert len([*engine.scheduler.planned]) == 0
        async with replica.live():
            await engine.wait_ready()
            assert await compute_window(engine, [request(5)]) == [[1]]


@asynccontextmanager
async def unread(engine: Engine, bad: Replica) -> AsyncIterator[tuple[RemoteDevice, list[QueueEntry]]]:
    """Have all rows given to a device that reads nothing, and is lost with the block; yield it and what it was sent."""
    async with await bad.accept() as stream:
        await stream.send_all(frame_of(Hello(8, 0, 2**24)))
        await until(lambda: engine.worker.links[-1].hello is not None)
        *others, device = engine.worker.links
        await until(lambda: len(engine.dispatcher.devices) == 1 + len(others))
        for other in others:
            other.is_draining = True
        sent = submit(engine, request(*range(2**22)))  # more than the buffers of both ends
        await until(lambda: device.in_flight)
        yield device, sent
        for other in others:
            other.is_draining = False


async def test_rows_that_were_not_sent_to_a_lost_device_only_wait_again(make):
    good, bad = make(0), make(1)
    async with good.listen(), bad.listen(), good.live(), asking(good, bad) as engine:
        async with unread(engine, bad) as (device, sent):
            unsent = submit(engine, *[request(index) for index in range(5)])
            await until(lambda: len(device.in_flight) == 2)
            left = submit(engine, request(7), request(8))
            engine.withdraw(unsent[0])
        await settled([*sent, *unsent[1:], *left])
        assert [entry.losses for entry in [*sent, *unsent, *left]] == [1] + [0] * 7
        assert not unsent[0].is_settled
        assert sum(good.runner.rows) == 7
        assert good.runner.rows.count(1) == 1, "only what was sent is computed alone"


async def test_rows_that_were_not_sent_fail_as_those_that_were_when_the_last_device_is_lost(make):
    bad = make()
    async with bad.listen(), asking(bad) as engine:
        async with unread(engine, bad) as (device, entries):
            entries += submit(engine, request(5))
            await until(lambda: len(device.in_flight) == 2)
        assert [type(error) for error in await settled(entries)] == [EngineProcessDiedError] * 2
        assert not len(engine.scheduler)


async def test_a_planned_batch_that_was_not_sent_to_a_lost_device_is_computed_by_another(make):
    good, bad = make(0), make(1)
    found = []

    async def ask(engine) -> None:
        found.extend(await compute_window(engine, [request(5), request(6)]))

    async with good.listen(), bad.listen(), good.live(), asking(good, bad) as engine, trio.open_nursery() as nursery:
        async with unread(engine, bad) as (device, sent):
            nursery.start_soon(ask, engine)
            await until(lambda: len(device.in_flight) == 2)
        await until(lambda: found)
        await settled(sent)
        assert found == [[1, 1]]
