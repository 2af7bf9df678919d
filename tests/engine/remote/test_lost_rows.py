"""Rows of device servers that are lost: which are computed by others."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import trio

from tests.conftest import until
from tests.engine.engines import compute_window
from tests.engine.remote.replicas import Replica, asking, frame_of, request
from trio_pool_serve.engine.engine import Engine
from trio_pool_serve.engine.lost_rows import REFUSAL
from trio_pool_serve.engine.queue_entry import QueueEntry
from trio_pool_serve.engine.remote.remote_device import RemoteDevice
from trio_pool_serve.engine.remote.wire import Hello
from trio_pool_serve.errors import EngineProcessDiedError
from trio_pool_serve.types import PoolingOutput, PoolingRequest


def submit(engine: Engine, *asked: PoolingRequest) -> list[QueueEntry]:
    """Submit rows at once, so that they are of one batch."""
    entries = [QueueEntry(each) for each in asked]
    engine.submit_nowait(*entries)
    return entries


async def settled(entries: Sequence[QueueEntry]) -> list[PoolingOutput | Exception | None]:
    await until(lambda: all(entry.is_settled for entry in entries))
    return [entry.output or entry.error for entry in entries]


async def test_the_neighbours_of_a_row_that_kills_are_computed_each_alone(make):
    first, second, third = replicas = [make(number) for number in range(3)]

    def let(index: int) -> None:
        """Have only this one get rows."""
        for number, device in enumerate(engine.devices.links):
            device.is_draining = number != index
        engine.queue.dispatcher.note_room()

    async with first.listen(), second.listen(), third.listen(), asking(*replicas) as engine:
        for replica in replicas:
            replica.runner.gate.clear()
        async with third.live():
            async with second.live():
                async with first.live():
                    await until(lambda: len(engine.queue.dispatcher.devices) == 3)
                    let(0)
                    entries = submit(engine, *[request(index) for index in range(4)])
                    await until(lambda: first.runner.rows == [4])
                    let(1)
                await until(lambda: second.runner.rows == [1])
                let(2)
            third.runner.gate.set()
            refused, *computed = await settled(entries)
        assert str(refused) == REFUSAL
        assert [output.values[0][1] for output in computed] == [1, 2, 3]
        assert third.runner.rows == [1] * 3


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
            await until(lambda: len(engine.queue.scheduler.planned) == 3)
            await until(lambda: replica.runner.batches)
        await until(lambda: found)
        assert [type(outcome) for outcome in found] == [EngineProcessDiedError] * 4
        assert len(engine.queue.scheduler.planned) == 0
        async with replica.live():
            await engine.wait_ready()
            assert await compute_window(engine, [request(5)]) == [[1]]


@asynccontextmanager
async def unread(engine: Engine, bad: Replica) -> AsyncIterator[tuple[RemoteDevice, list[QueueEntry]]]:
    """Have all rows given to a device that reads nothing, and is lost with the block; yield it and what it was sent."""
    async with await bad.accept() as stream:
        await stream.send_all(frame_of(Hello(8, 0, 2**24)))
        await until(lambda: engine.devices.links[-1].hello is not None)
        *others, device = engine.devices.links
        await until(lambda: len(engine.queue.dispatcher.devices) == 1 + len(others))
        for other in others:
            other.is_draining = True
        sent = submit(engine, request(*range(2**22)))  # more than the buffers of both ends
        await until(lambda: device.in_flight)
        yield device, sent
        for other in others:
            other.is_draining = False


async def test_rows_that_were_not_sent_fail_as_those_that_were_when_the_last_device_is_lost(make):
    bad = make()
    async with bad.listen(), asking(bad) as engine:
        async with unread(engine, bad) as (device, entries):
            entries += submit(engine, request(5))
            await until(lambda: len(device.in_flight) == 2)
        assert [type(error) for error in await settled(entries)] == [EngineProcessDiedError] * 2
        assert not len(engine.queue.scheduler)


async def test_what_was_not_sent_to_a_lost_device_only_waits_again(make):
    good, bad = make(0), make(1)
    found = []

    async def ask_planned(engine) -> None:
        found.extend(await compute_window(engine, [request(5), request(6)]))

    async with good.listen(), bad.listen(), good.live(), asking(good, bad) as engine, trio.open_nursery() as nursery:
        async with unread(engine, bad) as (device, sent):
            nursery.start_soon(ask_planned, engine)
            await until(lambda: len(device.in_flight) == 2)
            unsent = submit(engine, *[request(index) for index in range(5)])
            await until(lambda: len(device.in_flight) == 3)
            left = submit(engine, request(7), request(8))
            engine.withdraw(unsent[0])
        await settled([*sent, *unsent[1:], *left])
        await until(lambda: found)
        assert found == [[1, 1]]
        assert [entry.losses for entry in [*sent, *unsent, *left]] == [1] + [0] * 7
        assert not unsent[0].is_settled
        assert sum(good.runner.rows) == 7 + 2
        assert good.runner.rows.count(1) == 1, "only what was sent is computed alone"
