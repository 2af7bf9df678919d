"""Engines and API processes that have the key and do not do as they should: they hurt their own rows only."""

import contextlib
import math
import struct

import msgspec
import pytest
import trio
from msgspec.structs import replace

from tests.conftest import until
from tests.engine.remote.replicas import asking, frame_of, outcome_of, request
from trio_pool_serve.engine.batching import TokenBudget
from trio_pool_serve.engine.remote.parts import row_frames
from trio_pool_serve.engine.remote.wire import (
    Answers,
    BatchFacts,
    Done,
    FromEngine,
    Hello,
    Leaving,
    Outputs,
    Part,
    QueueState,
    Submit,
    ToEngine,
    Withdraw,
)
from trio_pool_serve.errors import BatchFailedError, UnsendableError
from trio_pool_serve.processes.framed_stream import FramedStream
from trio_pool_serve.types import PoolingOutput, PoolingRequest

HELLO = Hello(8, 0, 2048)


async def until_ended(stream: FramedStream[FromEngine]) -> None:
    """Wait until the engine has ended the connection."""
    with trio.fail_after(10):
        while await stream.receive() is not None:
            """What it sends until then."""
    await stream.aclose()


async def test_an_engine_that_does_not_read_holds_up_its_own_rows_only_and_is_left(make):
    good, bad = make(0), make(1, timeout_s=1.0)
    computed = []

    async def ask(engine, asked: PoolingRequest) -> None:
        computed.append(await engine.submit(asked))

    async def never_read() -> None:
        async with await bad.accept() as stream:
            await stream.send_all(frame_of(replace(HELLO, launches=8)))
            with contextlib.suppress(trio.BrokenResourceError):
                while True:  # it says that it is there
                    await stream.send_all(frame_of(Answers([], [], 2048)))
                    await trio.sleep(0.1)

    async with good.listen(), bad.listen(), good.live(), asking(good, bad) as engine, trio.open_nursery() as nursery:
        nursery.start_soon(never_read)
        await until(lambda: len(engine.queue.dispatcher.devices) == 2)
        engine.devices.links[0].is_draining = True
        for _ in range(16):  # more than the buffers of both ends
            nursery.start_soon(ask, engine, request(*range(2**20)))
        await until(lambda: engine.devices.links[1].waiting_rows == 16)
        engine.devices.links[0].is_draining = False
        engine.devices.links[1].is_draining = True
        await engine.submit_all([request(5)] * 20)
        assert not computed
        await until(lambda: len(computed) == 16)
        assert engine.devices.links[1].losses == 1
        nursery.cancel_scope.cancel()


async def test_an_engine_that_has_rows_and_answers_none_stalls_though_it_sends_heartbeats(make):
    good, bad = make(0), make(1)

    async def hold() -> None:
        async with await bad.accept() as stream:
            await stream.send_all(frame_of(HELLO))
            while await stream.receive_some():
                await stream.send_all(frame_of(Answers([], [], 2048)))

    async with good.listen(), bad.listen(), good.live(), asking(good, bad) as engine, trio.open_nursery() as nursery:
        nursery.start_soon(hold)
        await until(lambda: len(engine.queue.dispatcher.devices) == 2)
        device = engine.devices.links[1]
        device.stall_timeout_s = math.inf
        engine.devices.links[0].is_draining = True
        nursery.start_soon(outcome_of, engine, request(5))
        await until(lambda: device.waiting_rows)
        engine.devices.links[0].is_draining = False
        assert device.stall_reason == ""
        device.stall_timeout_s, device._received_at = 0.1, math.inf
        await until(lambda: "has answered no rows" in device.stall_reason)
        await engine.submit_all([request(5)] * 20)
        assert sum(good.runner.rows) == 20
        nursery.cancel_scope.cancel()


async def test_an_engine_that_leaves_twice_leaves_once(played):
    engine, stream = played
    async with trio.open_nursery() as nursery:
        (device,) = engine.devices.links
        nursery.start_soon(outcome_of, engine, request(5))  # for which it stays connected
        await until(lambda: device.waiting_rows)
        tasks = trio.lowlevel.current_statistics().tasks_living
        await stream.send_all(frame_of(Leaving()) * 1000 + frame_of(Answers([], [], 7)))
        await until(lambda: device.answers is not None and device.answers.budget == 7)
        assert trio.lowlevel.current_statistics().tasks_living <= tasks + 1
        nursery.cancel_scope.cancel()


GARBAGE = {
    "noise": b"\xc1" * 100,
    "an unknown message": frame_of(["Explode", 5]),
    "a part with fewer than no bytes": frame_of(["Submit", [[[1], -5, []]], 0, 1]),
    "a part without numbers": frame_of(["Submit", [[1, 0, []]], 0, 1]),
    "a batch of no rows": frame_of(["Submit", [], 0, 0]),
    "a number of 64 bits": frame_of(["Withdraw", [2**64 - 1]]),
}
"""Invalid in either direction."""

EXCESSIVE = {
    "withdrawals": Withdraw([0] * 1025),
    "parts": Submit([Part([0], 0, msgspec.Raw(b"\x90"))] * 1025, BatchFacts(0, 1025)),
    "rows of a part": Submit([Part([0] * 1025, 0, msgspec.Raw(b"\x90"))], BatchFacts(0, 1025)),
    "rows of a batch": Submit([Part([0, 1], 0, msgspec.Raw(b"\x90"))], BatchFacts(0, 1)),
    "rows": Submit([], BatchFacts(0, 2**21)),
    "small requests": Submit([], BatchFacts(0, 1, queue=QueueState(small_requests=2**64 - 1))),
}


API_NONSENSE = {
    **GARBAGE,
    "a large payload that never comes": struct.pack("<IQ", 1, 4 * 2**30) + b"x",
    "half a frame": frame_of(["Withdraw", [1]])[:-1],
    **{name: frame_of(message) for name, message in EXCESSIVE.items()},
}


@pytest.mark.parametrize("sent", API_NONSENSE.values(), ids=API_NONSENSE)
async def test_an_api_process_that_sends_what_it_may_not_is_left_alone(replica, engine, sent):
    hello, stream = engine.devices.links[0].hello, await replica.connect()
    await stream.stream.send_all(sent)
    await stream.stream.send_eof()
    await until_ended(stream)
    assert isinstance(await outcome_of(engine, request(5)), PoolingOutput)
    assert engine.devices.links[0].hello is hello, "it is the same connection"


async def test_many_rows_are_withdrawn_in_several_frames(replica, engine):
    replica.engine.device.budget = TokenBudget(10_000)
    await engine.submit(request(1))  # its answer tells the budget
    replica.runner.gate.clear()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(engine.submit, request(1))
        await until(lambda: replica.engine.statistics().in_flight_batches)
        nursery.start_soon(engine.submit_all, [request(5)] * 3000)
        await until(lambda: replica.engine.joiner.tokens == 3000)
        (batch,) = replica.engine.dispatcher.in_flight
        nursery.cancel_scope.cancel()
    await until(lambda: batch.entries[0].is_abandoned)  # so that it would not be computed again if it failed
    await until(lambda: replica.engine.statistics().queued_rows == 0)
    replica.runner.gate.set()


async def test_an_engine_that_says_hello_twice_is_left(make):
    replica = make()
    async with replica.listen(), asking(replica) as engine:
        async with await replica.accept() as stream:
            await stream.send_all(frame_of(Hello(8, 0, 2048)) * 2)
            await until(lambda: "twice" in engine.devices.links[0].failure)
        assert engine.queue.dispatcher.devices == []


NONSENSE = {
    "dimensions": replace(HELLO, dimensions=-1),
    "a batch": replace(HELLO, max_batch_tokens=2**40),
    "agreement": replace(HELLO, cosine_with_float32=math.nan),
    "a probe": replace(HELLO, probe=([2**40], "trio_pool_serve.types:Embed")),
    "a fingerprint": replace(HELLO, fingerprint="0123456789abcdef\n"),
    "a header": replace(HELLO, fingerprint="0\r\nset-cookie: a"),
    "a zone": replace(HELLO, zone="z" * 10**6),
    "a budget": Answers([], [], 2**40),
    "waiting tokens": Answers([], [], 2048, 0, 2**62),
    "computed tokens": Answers([], [], 2048, -1),
    "seconds": Answers([], [Done(0, -1.0)], 2048),
    "a reason": Answers([], [], 2048, stall_reason="r" * 10**6),
}


ENGINE_NONSENSE = {
    **{name: frame_of(HELLO) + garbage for name, garbage in GARBAGE.items()},
    **{
        name: frame_of(said) if isinstance(said, Hello) else frame_of(HELLO) + frame_of(said)
        for name, said in NONSENSE.items()
    },
}


@pytest.mark.parametrize("sent", ENGINE_NONSENSE.values(), ids=ENGINE_NONSENSE)
async def test_an_engine_that_says_what_cannot_be_is_left_and_no_other(make, sent, caplog):
    good, bad = make(0), make(1)
    async with good.listen(), bad.listen(), good.live(), asking(good, bad) as engine:
        await engine.wait_ready()
        hello = engine.devices.links[0].hello
        async with await bad.accept() as stream:
            await stream.send_all(sent)
            with trio.fail_after(10), contextlib.suppress(trio.BrokenResourceError):
                while await stream.receive_some():
                    """Until the link is given up."""
        assert "a connection between processes ends" in caplog.text
        assert engine.queue.dispatcher.devices == engine.devices.links[:1]
        assert isinstance(await outcome_of(engine, request(5)), PoolingOutput)
        assert engine.devices.links[0].hello is hello


WRONG_ANSWERS = {
    "another number of outputs": ([msgspec.Raw(msgspec.msgpack.encode(Outputs(0.1, 0.1, 0.1, [])))], 0),
    "none": ([], 0),
    "nothing that can be read": ([msgspec.Raw(b"\x90")], 0),
    "rows without the end of the batch": ([msgspec.Raw(b"\x90")], None),
}


@pytest.mark.parametrize(("contents", "done"), WRONG_ANSWERS.values(), ids=WRONG_ANSWERS)
async def test_an_engine_with_a_wrong_answer_fails_the_row_alone(played, contents, done):
    engine, stream = played
    outcomes = []

    async def ask() -> None:
        outcomes.append(await outcome_of(engine, request(5)))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask)
        framed = FramedStream(stream, ToEngine)
        message, _ = await framed.receive()
        (part,) = message.parts
        ended = [] if done is None else [Done(message.batch.number + done, 0.1)]
        await framed.send(Answers([Part(part.ids, 0, content) for content in contents], ended, 2048))
    assert isinstance(outcomes[0], UnsendableError | BatchFailedError)
    (device,) = engine.devices.links
    assert device.waiting_rows == device.losses == 0
    assert len(device.in_flight) == (done is None)


async def test_answers_to_batches_and_rows_that_were_not_sent_change_nothing(make):
    replica = make()
    async with replica.listen(), asking(replica) as engine, await replica.accept() as stream:
        nothing = msgspec.Raw(msgspec.msgpack.encode(Outputs(0.1, 0.1, 0.1, [])))
        for computed in (10**9, 0, 5):  # it may count as it likes
            answers = Answers([Part([3, 3, 2**63], 0, nothing)], [Done(8, 0.0), Done(8, 1e9)], computed, computed)
            hello = frame_of(HELLO) if engine.devices.links[0].hello is None else b""
            await stream.send_all(hello + frame_of(answers))
            (device,) = engine.devices.links
            await until(lambda device=device, number=computed: device.answers and device.answers.budget == number)
        assert engine.devices.links[0].losses == 0
        assert engine.devices.links[0].passes.tokens_per_s == 0
        assert engine.queue.dispatcher.others_tokens == 5


async def test_an_api_process_with_more_batches_than_it_may_have_loses_its_connection_alone(replica, engine):
    replica.runner.gate.clear()
    async with trio.open_nursery() as nursery:
        greedy = await replica.connect()

        async def send(batch: int) -> None:
            (frame,) = row_frames([(batch, request(5))], pytest.fail)
            await greedy.send(Submit(frame.parts, BatchFacts(batch, 1)), frame.buffers)

        for batch in range(replica.engine.most_batches):
            await send(batch)
        await until(lambda: replica.engine.joiner.tokens == replica.engine.most_batches - 1)
        nursery.start_soon(engine.submit, request(6))
        await until(lambda: replica.engine.joiner.tokens == replica.engine.most_batches)
        await send(99)
        await until_ended(greedy)
        assert replica.engine.joiner.tokens == 1, "the row of the other one"
        assert len(replica.engine.connections) == 1
        replica.runner.gate.set()


async def test_a_batch_with_the_number_of_one_that_waits_ends_its_connection_alone(replica, engine):
    replica.runner.gate.clear()
    stream = await replica.connect()
    (frame,) = row_frames([(1, request(5))], pytest.fail)
    for _ in range(2):
        await stream.send(Submit(frame.parts, BatchFacts(4, 1)), frame.buffers)
    await until_ended(stream)
    replica.runner.gate.set()
    assert isinstance(await outcome_of(engine, request(5)), PoolingOutput)
    assert replica.engine.joiner.tokens == 0
