"""Engines and API processes that have the key and do not do as they should: they hurt their own rows only."""

import contextlib
import math

import msgspec
import numpy as np
import pytest
import trio
from msgspec.structs import replace

from tests.engine.remote.replicas import asking
from tests.engine.remote.test_process_engine import frame_of, outcome_of, request, until
from trio_pool_serve.engine.compute_rates import UNKNOWN, WORK_CLASSES
from trio_pool_serve.engine.remote.routing import rate_of
from trio_pool_serve.engine.remote.wire import (
    Answers,
    Failure,
    Hello,
    Leaving,
    Outputs,
    Part,
    Submit,
    ToEngine,
    Withdraw,
)
from trio_pool_serve.errors import UnsendableError
from trio_pool_serve.processes.framed_stream import FramedStream
from trio_pool_serve.types import PoolingOutput, PoolingRequest

HELLO = Hello(8, 0, 2048)


async def test_an_engine_that_does_not_read_holds_up_its_own_rows_only_and_is_left(make):
    good, bad = make(0), make(1, timeout_s=1.0)
    failed = []

    async def ask(engine, asked: PoolingRequest) -> None:
        outcome = await outcome_of(engine, asked)
        if isinstance(outcome, Exception):
            failed.append(outcome)

    async def never_read() -> None:
        async with await bad.accept() as stream:
            await stream.send_all(frame_of(Hello(8, 0, 2048)))
            with contextlib.suppress(trio.BrokenResourceError):
                while True:  # it says that it is there
                    await stream.send_all(frame_of(Answers([], 0, 0.0, UNKNOWN.tobytes())))
                    await trio.sleep(0.1)

    async with good.listen(), bad.listen(), good.live(), asking(good, bad) as engine, trio.open_nursery() as nursery:
        nursery.start_soon(never_read)
        await until(lambda: len(engine._routing.ready) == 2)
        engine._links[0].is_draining = True
        for _ in range(16):  # more than the buffers of both ends
            nursery.start_soon(ask, engine, request(*range(2**20)))
        await until(lambda: engine._links[1].waiting_rows == 16)
        engine._links[0].is_draining = False
        engine._links[1].is_draining = True
        await engine.submit_all([request(5)] * 20)
        await until(lambda: len(failed) == 16)
        assert engine._links[1].losses == 1
        nursery.cancel_scope.cancel()


async def test_an_engine_that_has_rows_and_answers_none_stalls_though_it_sends_heartbeats(make):
    good, bad = make(0), make(1)

    async def hold() -> None:
        async with await bad.accept() as stream:
            await stream.send_all(frame_of(HELLO))
            while await stream.receive_some():
                await stream.send_all(frame_of(Answers([], 0, 0.0, UNKNOWN.tobytes())))

    async with good.listen(), bad.listen(), good.live(), asking(good, bad) as engine, trio.open_nursery() as nursery:
        nursery.start_soon(hold)
        await until(lambda: len(engine._routing.ready) == 2)
        link = engine._links[1]
        link.stall_timeout_s, link.max_queue_s = math.inf, 0.0
        engine._links[0].is_draining = True
        nursery.start_soon(outcome_of, engine, request(5))
        await until(lambda: link.waiting_rows)
        engine._links[0].is_draining = False
        assert link.stall_reason == ""
        link.stall_timeout_s, link._last_heard = 0.1, math.inf
        await until(lambda: "has answered none" in link.stall_reason)
        await engine.submit_all([request(5)] * 20)
        assert sum(good.runner.rows) == 20
        nursery.cancel_scope.cancel()


async def test_an_engine_that_leaves_twice_leaves_once(make):
    replica = make()
    async with replica.listen(), asking(replica) as engine, await replica.accept() as stream:
        await stream.send_all(frame_of(HELLO))
        await engine.wait_ready()
        with engine.open_scope():  # for which it stays connected
            tasks = trio.lowlevel.current_statistics().tasks_living
            await stream.send_all(frame_of(Leaving()) * 1000 + frame_of(Answers([], 7, 0.0, UNKNOWN.tobytes())))
            await until(lambda: engine._links[0].waiting_tokens == 7)
            assert trio.lowlevel.current_statistics().tasks_living <= tasks + 1


EXCESSIVE = {
    "withdrawals": Withdraw([0] * 1025),
    "parts": Submit([Part([0], 0, msgspec.Raw(b"\x90"))] * 1025),
    "rows of a part": Submit([Part([0] * 1025, 0, msgspec.Raw(b"\x90"))]),
}


@pytest.mark.parametrize("message", EXCESSIVE.values(), ids=EXCESSIVE)
async def test_an_api_process_that_sends_more_than_a_frame_may_have_is_left_alone(make, message):
    replica = make()
    async with replica.listen(), replica.live(), asking(replica) as engine:
        await engine.wait_ready()
        hello, stream = engine._links[0].hello, await replica.connect()
        await stream.receive()
        await stream.send(message)
        with trio.fail_after(10):
            while await stream.receive() is not None:
                """Until the engine ends the connection."""
        await stream.aclose()
        assert isinstance(await outcome_of(engine, request(5)), PoolingOutput)
        assert engine._links[0].hello is hello


async def test_a_part_that_is_larger_than_any_that_is_sent_fails_alone_and_unread(make):
    replica = make()
    async with replica.listen(), replica.live():
        stream = await replica.connect()
        await stream.receive()
        content = msgspec.Raw(msgspec.msgpack.encode([[1], [["x" * 40_000, {}]]]))
        await stream.send(Submit([Part([7], 0, content)]))
        while not (received := await stream.receive())[0].parts:
            """A heartbeat."""
        await stream.aclose()
        (part,) = received[0].parts
        failure = msgspec.msgpack.decode(part.content, type=Failure)
        assert part.ids == [7]
        assert "are too many" in failure.message


async def test_many_rows_are_withdrawn_in_several_frames(make):
    replica = make()
    async with replica.listen(), replica.live(), asking(replica) as engine:
        await engine.wait_ready()
        replica.runner.gate.clear()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(engine.submit_all, [request(5)] * 3000)
            await until(lambda: replica.engine.waiting_tokens == 3000)
            nursery.cancel_scope.cancel()
        await until(lambda: replica.engine.statistics().queued_rows == 0)
        replica.runner.gate.set()


async def test_an_engine_that_says_hello_twice_is_left(make):
    replica = make()
    async with replica.listen(), asking(replica) as engine:
        async with await replica.accept() as stream:
            await stream.send_all(frame_of(Hello(8, 0, 2048)) * 2)
            await until(lambda: "twice" in engine._links[0].failure)
        assert engine._routing.ready == []


NONSENSE = {
    "dimensions": replace(HELLO, dimensions=-1),
    "a batch": replace(HELLO, max_batch_tokens=2**40),
    "agreement": replace(HELLO, cosine_with_float32=math.nan),
    "a probe": replace(HELLO, probe=([2**40], "trio_pool_serve.types:Embed")),
    "a zone": replace(HELLO, zone="z" * 10**6),
    "waiting tokens": Answers([], 2**62, 0.0, UNKNOWN.tobytes()),
    "a reason": Answers([], 0, 0.0, UNKNOWN.tobytes(), "r" * 10**6),
}


@pytest.mark.parametrize("message", NONSENSE.values(), ids=NONSENSE)
async def test_an_engine_that_says_what_cannot_be_is_left(make, message, caplog):
    replica = make()
    async with replica.listen(), asking(replica) as engine:
        async with await replica.accept() as stream:
            before = b"" if isinstance(message, Hello) else frame_of(HELLO)
            await stream.send_all(before + frame_of(message))
            with trio.fail_after(10), contextlib.suppress(trio.BrokenResourceError):
                while await stream.receive_some():
                    """Until the link is given up."""
        assert engine._routing.ready == []
        assert "an invalid frame" in caplog.text


async def test_an_engine_that_sends_another_number_of_outputs_fails_the_row_alone(make):
    replica = make()
    outcomes = []

    async def ask(engine) -> None:
        outcomes.append(await outcome_of(engine, request(5)))

    async with (
        replica.listen(),
        asking(replica) as engine,
        trio.open_nursery() as nursery,
        await replica.accept() as stream,
    ):
        await stream.send_all(frame_of(HELLO))
        await engine.wait_ready()
        nursery.start_soon(ask, engine)
        framed = FramedStream(stream, ToEngine)
        message, _ = await framed.receive()
        (part,) = message.parts
        nothing = msgspec.Raw(msgspec.msgpack.encode(Outputs([0.1], 0.1, 0.1, [])))
        await framed.send(Answers([Part(part.ids, 0, nothing)], 0, 0.0, UNKNOWN.tobytes()))
        await until(lambda: outcomes)
        assert isinstance(outcomes[0], UnsendableError)
        assert engine._links[0].waiting_rows == engine._links[0].losses == 0


async def test_an_engine_that_measures_nonsense_is_an_engine_without_a_rate(make):
    replica = make()
    async with replica.listen(), asking(replica) as engine, await replica.accept() as stream:
        for number, rate in enumerate((-1.0, 0.0, math.inf, math.nan), start=1):
            rates = np.full(WORK_CLASSES, rate)
            rates[1:] = 1e-3
            hello = b"" if engine._links[0].hello else frame_of(Hello(8, 0, 2048))
            await stream.send_all(hello + frame_of(Answers([], number, math.inf, rates.tobytes())))
            await until(lambda number=number: engine._links[0].waiting_tokens == number)
            assert engine._links[0].seconds_per_token is UNKNOWN
            assert engine._links[0].tokens_per_s == 0
            assert rate_of(engine._links[0], 3) is None
