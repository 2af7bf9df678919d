"""Links by TCP: peers that fall silent, engines that leave, and what they tell of others."""

import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from types import SimpleNamespace

import numpy as np
import pytest
import trio
from attrs import Factory, define, field

from tests.conftest import until
from tests.engine.remote.replicas import Replica, asking, frame_of, outcome_of, request
from trio_pool_serve.engine.admission import LOAD_MARGIN, EstimatedWork
from trio_pool_serve.engine.engine import Engine
from trio_pool_serve.engine.queue_entry import QueueEntry
from trio_pool_serve.engine.remote.link import LinkRefusedError, wait_silent
from trio_pool_serve.engine.remote.parts import answer_frames, row_frames
from trio_pool_serve.engine.remote.wire import Answers, BatchFacts, Done, Hello, Leaving, Submit, ToEngine
from trio_pool_serve.engine.speed import WORK_CLASSES
from trio_pool_serve.errors import EngineLoadingError, EngineProcessDiedError, OverloadedError
from trio_pool_serve.processes.framed_stream import FramedStream
from trio_pool_serve.types import PoolingOutput

SHORT_S = 0.3


async def test_an_engine_that_falls_silent_fails_its_rows_and_is_connected_to_again(make):
    replica = make(timeout_s=SHORT_S)
    failed: list[Exception] = []

    async def ask(engine) -> None:
        failed.append(await outcome_of(engine, request(1)))

    async with replica.listen(), asking(replica) as engine, trio.open_nursery() as nursery:
        async with await replica.accept() as silent:
            await silent.send_all(frame_of(Hello(8, 0, 2048)))
            await engine.wait_ready()
            nursery.start_soon(ask, engine)
            async with await replica.accept():  # the next connection
                await until(lambda: failed)
        assert isinstance(failed[0], EngineProcessDiedError)
        assert "was lost" in str(failed[0])
        assert engine.devices.links[0].losses == 1
        assert "nothing was received" in engine.devices.links[0].failure
        async with replica.live():
            await engine.wait_ready()
            assert (await engine.submit(request(9))).values[0][2] == 9
            assert engine.devices.links[0].failure == ""


async def test_an_engine_that_only_sends_heartbeats_is_not_lost(make):
    replica = make(timeout_s=SHORT_S)
    async with replica.listen(), replica.live(), asking(replica) as engine:
        await engine.wait_ready()
        hello = engine.devices.links[0].hello
        for _ in range(4):
            await trio.sleep(SHORT_S)
        assert engine.devices.links[0].hello is hello, "it is the same connection"
        assert len(replica.engine.connections) == 1


async def test_an_api_process_that_falls_silent_has_its_rows_withdrawn(make):
    replica = make(timeout_s=SHORT_S)
    replica.runner.gate.clear()
    async with replica.listen(), replica.live(), asking(replica) as engine, trio.open_nursery() as nursery:
        await engine.wait_ready()
        silent = await replica.connect()
        (frame,) = row_frames([(1, request(*[7] * 9)), (2, request(*[7] * 9))], pytest.fail)
        await silent.send(Submit(frame.parts, BatchFacts(0, 2)), frame.buffers)
        await until(lambda: replica.engine.joiner.tokens == 9)  # the other one is launched
        nursery.start_soon(engine.submit_all, [request(1), request(2, 2)])
        await until(lambda: replica.engine.joiner.tokens == 9 + 3)
        with trio.fail_after(10):
            while await silent.receive() is not None:
                """What the engine sends until it ends the connection."""
        await silent.aclose()
        await until(lambda: len(replica.engine.connections) == 1)
        assert replica.engine.joiner.tokens == 3, "the rows of the other API process"
        replica.runner.gate.set()


@pytest.mark.parametrize(
    ("still", "moving", "silence"),
    [
        ("received_bytes", "sent_bytes", "nothing was received for 6 s"),
        ("sent_bytes", "received_bytes", "nothing could be sent for 6 s"),
    ],
)
async def test_silence_is_counted_in_the_time_in_which_this_process_ran(mock_clock, still, moving, silence):
    stream = SimpleNamespace(received_bytes=0, sent_bytes=0)
    found = []

    async def wait() -> None:
        with pytest.raises(LinkRefusedError) as refusal:
            await wait_silent(stream, 6.0)
        found.append(str(refusal.value))

    async def pass_s(seconds: float) -> None:
        setattr(stream, moving, getattr(stream, moving) + 1)
        mock_clock.jump(seconds)
        await trio.testing.wait_all_tasks_blocked()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait)
        await trio.testing.wait_all_tasks_blocked()
        await pass_s(1000)  # the process was stopped for so long
        for _ in range(4):
            await pass_s(1.0)
        assert not found
        setattr(stream, still, 1)
        for _ in range(6):
            await pass_s(1.0)
        assert not found
        await pass_s(1.0)
        assert found == [silence]


async def test_a_slow_path_is_not_taken_for_silence(make):
    """A row of megabytes takes several times as long as a silence may last, in which it is read all the time."""
    replica = make(timeout_s=1.0)
    rows = []

    async def read_slowly() -> None:
        async with await replica.accept() as stream:
            stream.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 * 1024)
            await stream.send_all(frame_of(Hello(8, 0, 2048)))
            framed = FramedStream(Slow(stream), ToEngine)
            while (received := await framed.receive()) is not None:
                if isinstance(received[0], Submit):
                    rows.append(len(received[1]))

    @define(eq=False)
    class Slow:
        """Receives 1.3 MB in a second, and tells meanwhile that it is there."""

        stream: trio.SocketStream
        socket: "Slow" = field(init=False, default=Factory(lambda self: self, takes_self=True))

        async def receive_some(self, most: int) -> bytes:
            await self.pause()
            return await self.stream.receive_some(most)

        async def recv_into(self, buffer: memoryview) -> int:
            await self.pause()
            return await self.stream.socket.recv_into(buffer[: 64 * 1024])

        async def pause(self) -> None:
            await self.stream.send_all(frame_of(Answers([], [], 2048)))
            await trio.sleep(0.05)

    async with replica.listen(), asking(replica) as engine, trio.open_nursery() as nursery:
        nursery.start_soon(read_slowly)
        await engine.wait_ready()
        nursery.start_soon(outcome_of, engine, request(*range(10**6)))
        await until(lambda: rows)
        assert rows == [4 * 10**6]
        assert engine.devices.links[0].losses == 0
        nursery.cancel_scope.cancel()


# -- leaving and draining --------------------------------------------------------------------------------


@pytest.mark.parametrize("by_operator", [False, True])
async def test_the_only_engine_computes_what_waits_for_it_before_it_leaves(replica, engine, by_operator):
    replica.runner.gate.clear()
    outputs: list[PoolingOutput] = []

    async def ask() -> None:
        outputs.extend(await engine.submit_all([request(index) for index in range(100)]))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask)
        await until(lambda: len(engine.queue.dispatcher.in_flight) == 2)
        assert engine.statistics().queued_rows > 0
        if by_operator:
            engine.devices.links[0].is_draining = True
        else:
            replica.leaving.set()
            await until(lambda: not engine.devices.links[0].takes_rows)
        with pytest.raises(EngineLoadingError):
            await engine.submit(request(1))
        assert not replica.has_left, "it has rows"
        replica.runner.gate.set()
    assert len(outputs) == 100
    await until(lambda: replica.has_left != by_operator)


async def test_the_last_rows_of_an_engine_that_leaves_are_all_delivered(played):
    """Its connection ends with the last batch, while clients are being told."""
    engine, stream = played
    entries = [QueueEntry(request(index), lambda _, index=index: None) for index in range(40)]  # of as many clients
    engine.submit_nowait(*entries)
    framed = FramedStream(stream, ToEngine)
    message, _ = await framed.receive()
    outcomes = [(number, PoolingOutput((np.ones(8, np.float32),), 0.1, 0.1, 0.1)) for number in message.parts[0].ids]
    (frame,) = answer_frames([outcomes])
    answers = frame_of(Answers(frame.parts, [Done(message.batch.number, 0.1)], 2048), b"".join(frame.buffers))
    await stream.send_all(frame_of(Leaving()) + answers)
    await until(lambda: engine.devices.links[0].losses == 1)
    await until(lambda: all(entry.output is not None for entry in entries))
    assert not len(engine.queue.dispatcher.in_flight)


# -- what device servers tell of other API processes' work --------------------------------------------


@asynccontextmanager
async def telling(*replicas: Replica, shares: Sequence[float], stalled: Sequence[int] = ()) -> AsyncIterator[Engine]:
    """Devices that compute nothing and tell what share others have; together a millisecond for a token."""

    async def tell(replica: Replica, share: float, stall_reason: str) -> None:
        async with await replica.accept() as stream:
            answers = Answers([], [], 2048, others_share=share, stall_reason=stall_reason)
            await stream.send_all(frame_of(Hello(8, 0, 2048)) + frame_of(answers))
            while await stream.receive_some():
                """It computes nothing."""

    async with AsyncExitStack() as stack:
        for replica in replicas:
            await stack.enter_async_context(replica.listen())
        engine = await stack.enter_async_context(asking(*replicas))
        engine.queue.dispatcher.rates.seconds_per_token = np.full(WORK_CLASSES, 1e-3)
        async with trio.open_nursery() as nursery:
            for number, (replica, share) in enumerate(zip(replicas, shares, strict=True)):
                nursery.start_soon(tell, replica, share, "a batch does not come back" if number in stalled else "")
            await until(lambda: all(device.answers is not None for device in engine.devices.links))
            yield engine
            nursery.cancel_scope.cancel()


async def test_what_others_have_waiting_at_all_devices_slows_this_process_down(make):
    async with telling(*map(make, range(4)), shares=[1.0] * 4) as engine:
        with engine.admit(EstimatedWork(tokens=4000)):
            assert engine.queue.admission.waiting_s == pytest.approx(LOAD_MARGIN * 8)
            with pytest.raises(OverloadedError):
                engine.refuse_late(EstimatedWork(tokens=4000))


async def test_a_device_at_which_others_have_far_more_has_no_request_refused(make):
    """Rows go to the others. It may be one that says so only."""
    async with telling(*map(make, range(4)), shares=(0.0, 2.0, 0.0, 1e6)) as engine:
        with engine.admit(EstimatedWork(tokens=5)):
            assert engine.queue.admission.waiting_s < LOAD_MARGIN * 5e-3 * 2
            engine.refuse_late(EstimatedWork(tokens=5))


async def test_a_drained_device_does_not_hide_that_all_others_stall(make):
    async with telling(*map(make, range(2)), shares=(0.0, 0.0), stalled=(1,)) as engine:
        assert engine.state == "ready"
        engine.devices.links[0].is_draining = True
        assert engine.state == "stalled"
