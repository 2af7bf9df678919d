"""Links by TCP: peers that fall silent, engines that leave, rows that are sent again, several zones."""

import contextlib
import math
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
import trio
from attrs import Factory, define, field
from msgspec.structs import replace

from tests.engine.remote.replicas import Replica, asking, two_alive
from tests.engine.remote.test_process_engine import frame_of, outcome_of, request, until
from trio_pool_serve.engine.admission import LOAD_MARGIN, EstimatedWork
from trio_pool_serve.engine.compute_rates import UNKNOWN, WORK_CLASSES
from trio_pool_serve.engine.remote.process_engine import ProcessEngine
from trio_pool_serve.engine.remote.routing import rate_of
from trio_pool_serve.engine.remote.rows import row_frames
from trio_pool_serve.engine.remote.silence import wait_silent
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
from trio_pool_serve.errors import EngineLoadingError, EngineProcessDiedError, OverloadedError, UnsendableError
from trio_pool_serve.processes.framed_stream import FramedStream
from trio_pool_serve.types import Embed, HeldQuery, HoldQuery, PoolingOutput, PoolingRequest


@pytest.fixture
def make(tmp_path: Path):
    def make(number: int = 0, **options) -> Replica:
        return Replica(tmp_path / f"{number}.engine", by_tcp=True, **options)

    return make


SHORT_S = 0.3

HELLO = Hello(8, 0, 2048)


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
        assert "is lost" in str(failed[0])
        assert engine._links[0].losses == 1
        assert "nothing was received" in engine._links[0].failure
        async with replica.live():
            await engine.wait_ready()
            assert (await engine.submit(request(9))).values[0][2] == 9
            assert engine._links[0].failure == ""


async def test_an_engine_that_only_sends_heartbeats_is_not_lost(make):
    replica = make(timeout_s=SHORT_S)
    async with replica.listen(), replica.live(), asking(replica) as engine:
        await engine.wait_ready()
        hello, stream = engine._links[0].hello, replica.listener
        for _ in range(4):
            await trio.sleep(SHORT_S)
        assert engine._links[0].hello is hello, "it is the same connection"
        assert stream.connections == 1


async def test_an_api_process_that_falls_silent_has_its_rows_withdrawn(make):
    replica = make(timeout_s=SHORT_S)
    replica.runner.gate.clear()
    async with replica.listen(), replica.live(), asking(replica) as engine, trio.open_nursery() as nursery:
        await engine.wait_ready()
        silent = await replica.connect()
        (frame,) = row_frames([(1, request(*[7] * 9)), (2, request(*[7] * 9))], pytest.fail)
        await silent.send(Submit(frame.parts), frame.buffers)
        await until(lambda: replica.engine.waiting_tokens == 18)
        nursery.start_soon(engine.submit_all, [request(1), request(2, 2)])
        await until(lambda: replica.engine.waiting_tokens == 18 + 3)
        with trio.fail_after(10):
            while await silent.receive() is not None:
                """What the engine sends until it ends the connection."""
        await silent.aclose()
        await until(lambda: replica.listener.connections == 1)
        assert replica.engine.statistics().queued_tokens in (3, 2, 1, 0), "at most those of the other one"
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
        found.append(await wait_silent(stream, 6.0))

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


# -- leaving and draining --------------------------------------------------------------------------------


async def test_an_engine_that_leaves_computes_what_it_has_and_gets_no_more(make):
    first, second = make(0), make(1)
    async with two_alive(first, second), asking(first, second) as engine:
        await until(lambda: len(engine._routing.ready) == 2)
        first.runner.gate.clear()
        second.runner.gate.clear()
        outputs: list[PoolingOutput] = []

        async def ask() -> None:
            outputs.extend(await engine.submit_all([request(index) for index in range(20)]))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            await until(lambda: first.runner.rows and second.runner.rows)
            left = trio.Event()

            async def leave() -> None:
                await first.listener.leave()
                left.set()

            nursery.start_soon(leave)
            await until(lambda: engine._links[0].state == "draining")
            before = sum(first.runner.rows)
            second.runner.gate.set()
            await engine.submit_all([request(7)] * 10)
            assert sum(first.runner.rows) == before
            assert not left.is_set(), "it has rows"
            first.runner.gate.set()
            await left.wait()
        assert [output.values[0][1] for output in outputs] == list(range(20))


async def test_an_engine_that_leaves_waits_for_the_queries_that_it_holds(make):
    replica = make()
    async with replica.listen(), replica.live(), asking(replica) as engine:
        await engine.wait_ready()
        async with trio.open_nursery() as nursery:
            with engine.open_scope() as scope:
                await engine.submit(request(5, params=(HoldQuery(HeldQuery(scope)),)))
                nursery.start_soon(replica.listener.leave)
                await until(lambda: engine._links[0].state == "draining")
                assert replica.listener.connections == 1
                with pytest.raises(EngineLoadingError):
                    await engine.submit(request(1))
        assert replica.listener.connections == 0


async def test_leaving_can_be_cancelled(make):
    replica = make()
    async with replica.listen(), replica.live(), asking(replica) as engine, trio.open_nursery() as nursery:
        await engine.wait_ready()
        replica.runner.gate.clear()
        nursery.start_soon(engine.submit, request(1))
        await until(lambda: replica.engine.statistics().in_flight_batches)
        with trio.move_on_after(0.05) as limit:
            await replica.listener.leave()
        assert limit.cancelled_caught
        replica.runner.gate.set()


async def test_a_link_that_is_drained_gets_no_more_rows_until_it_is_used_again(make):
    first, second = make(0), make(1)
    async with two_alive(first, second), asking(first, second) as engine:
        await until(lambda: len(engine._routing.ready) == 2)
        engine._links[0].is_draining = True
        await engine.submit_all([request(7)] * 20)
        assert (sum(first.runner.rows), sum(second.runner.rows)) == (0, 20)
        engine._links[0].is_draining = False
        await engine.submit_all([request(7)] * 20)
        assert sum(first.runner.rows) > 0


# -- sent again ------------------------------------------------------------------------------------------


def alone(token: int, **fields) -> PoolingRequest:
    """Return a row that is all that its client has asked for."""
    return replace(request(token, **fields), is_alone=True)


async def lost_row(make, asked, *, retries_lost: bool = True, until_s: float = -math.inf) -> tuple[object, Replica]:
    """Have a row be at an engine that ends, not before ``until_s``; return its outcome, and the engine that is left."""
    first, second = make(0), make(1)
    outcomes = []

    async def ask(engine) -> None:
        outcomes.append(await outcome_of(engine, asked))

    async with (
        first.listen(),
        second.listen(),
        second.live(),
        asking(first, second, retries_lost=retries_lost) as engine,
        trio.open_nursery() as nursery,
    ):
        async with first.live():
            await until(lambda: len(engine._routing.ready) == 2)
            first.runner.gate.clear()
            nursery.start_soon(ask, engine)
            await until(lambda: first.engine.statistics().in_flight_batches)
            await trio.sleep_until(until_s)
        await until(lambda: outcomes)
    return outcomes[0], second


async def test_a_single_row_of_an_engine_that_is_lost_is_computed_elsewhere(make):
    outcome, second = await lost_row(make, alone(5))
    assert isinstance(outcome, PoolingOutput)
    assert sum(second.runner.rows) == 1


async def test_by_default_it_fails_and_nothing_is_computed_twice(make):
    outcome, second = await lost_row(make, alone(5), retries_lost=False)
    assert isinstance(outcome, EngineProcessDiedError)
    assert sum(second.runner.rows) == 0


async def test_a_row_whose_deadline_has_passed_is_not_computed_elsewhere(make):
    deadline = trio.current_time() + 0.5
    outcome, second = await lost_row(make, replace(alone(5), deadline=deadline), until_s=deadline)
    assert isinstance(outcome, EngineProcessDiedError)
    assert sum(second.runner.rows) == 0


async def test_a_row_of_a_larger_request_is_not_computed_elsewhere(make):
    """Though it is submitted by itself, as the last text of seventeen is: the others have failed."""
    outcome, second = await lost_row(make, request(5))
    assert isinstance(outcome, EngineProcessDiedError)
    assert sum(second.runner.rows) == 0


async def test_a_row_is_sent_again_once(make):
    """A row that ends its engine must not end all of them."""
    replicas = [make(number) for number in range(3)]
    ends = [trio.Event() for _ in replicas]
    outcomes = []

    async def live(replica: Replica, end: trio.Event) -> None:
        async with replica.live():
            await end.wait()

    async def ask(engine) -> None:
        outcomes.append(await outcome_of(engine, alone(5)))

    async with replicas[0].listen(), replicas[1].listen(), replicas[2].listen(), trio.open_nursery() as nursery:
        for replica, end in zip(replicas, ends, strict=True):
            replica.runner.gate.clear()
            nursery.start_soon(live, replica, end)
        async with asking(*replicas, retries_lost=True) as engine:
            await until(lambda: len(engine._routing.ready) == 3)
            nursery.start_soon(ask, engine)
            for count in (2, 1):
                await until(lambda: any(link.waiting_rows for link in engine._links))
                (holder,) = [link for link in engine._links if link.waiting_rows]
                ends[engine._links.index(holder)].set()
                await until(lambda count=count: len(engine._routing.ready) == count)
            await until(lambda: outcomes)
            assert isinstance(outcomes[0], EngineProcessDiedError)
            assert sum(link.waiting_rows for link in engine._links) == 0
        for end in ends:
            end.set()


async def test_a_held_query_s_row_is_not_sent_elsewhere(make):
    first, second = make(0), make(1)
    outcomes = []

    async def ask(engine) -> None:
        with engine.open_scope() as scope:
            outcomes.append(await outcome_of(engine, alone(5, params=(HoldQuery(HeldQuery(scope)),))))

    async with (
        first.listen(),
        second.listen(),
        second.live(),
        asking(first, second, retries_lost=True) as engine,
        trio.open_nursery() as nursery,
    ):
        async with first.live():
            await until(lambda: len(engine._routing.ready) == 2)
            first.runner.gate.clear()
            nursery.start_soon(ask, engine)
            await until(lambda: engine._links[0].waiting_rows)
        await until(lambda: outcomes)
    assert isinstance(outcomes[0], EngineProcessDiedError)
    assert sum(second.runner.rows) == 0


# -- zones -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("zone", ["here", "there"])
async def test_an_engine_of_any_zone_may_be_lost(make, zone):
    lost, other = make(0, zone=zone), make(1, zone="here")
    outcomes = []

    async def ask(engine) -> None:
        outcomes.append(await outcome_of(engine, request(5)))

    async with (
        lost.listen(),
        other.listen(),
        asking(lost, other, zone="here") as engine,
        trio.open_nursery() as nursery,
    ):
        async with lost.live():
            await engine.wait_ready()
            lost.runner.gate.clear()
            nursery.start_soon(ask, engine)
            await until(lambda: lost.engine.statistics().in_flight_batches)
        await until(lambda: outcomes)
        assert isinstance(outcomes[0], EngineProcessDiedError)
        async with other.live():
            await engine.wait_ready()
            assert isinstance(await outcome_of(engine, request(5)), PoolingOutput)


# -- rates -----------------------------------------------------------------------------------------------


async def test_the_rates_that_an_engine_has_measured_decide_how_much_it_gets(make):
    """A slow machine gets less: here a quarter."""
    fast, slow = make(0), make(1)
    async with fast.listen(), slow.listen(), asking(fast, slow) as engine, trio.open_nursery() as nursery:

        async def say(replica: Replica, seconds_per_token: float) -> None:
            async with await replica.accept() as stream:
                rates = np.full(WORK_CLASSES, seconds_per_token).tobytes()
                await stream.send_all(frame_of(Hello(8, 0, 2048)) + frame_of(Answers([], 0, 0.0, rates)))
                while await stream.receive_some():
                    """It computes nothing."""

        nursery.start_soon(say, fast, 0.001)
        nursery.start_soon(say, slow, 0.004)
        await until(lambda: len([link for link in engine._links if link.seconds_per_token is not UNKNOWN]) == 2)
        nursery.start_soon(engine.submit_all, [request(1, 2, params=(Embed(),)) for _ in range(500)])
        await until(lambda: sum(link.waiting_rows for link in engine._links) == 500)
        assert [link.waiting_rows for link in engine._links] == [400, 100]
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def telling(*replicas: Replica, waiting: Sequence[int]) -> AsyncIterator[ProcessEngine]:
    """Links to engines that compute nothing: each needs a millisecond for a token, and tells how many wait there."""

    async def tell(replica: Replica, tokens: int) -> None:
        async with await replica.accept() as stream:
            rates = np.full(WORK_CLASSES, 1e-3).tobytes()
            await stream.send_all(frame_of(Hello(8, 0, 2048)) + frame_of(Answers([], tokens, 0.0, rates)))
            while await stream.receive_some():
                """It computes nothing."""

    async with AsyncExitStack() as stack:
        for replica in replicas:
            await stack.enter_async_context(replica.listen())
        engine = await stack.enter_async_context(asking(*replicas))
        async with trio.open_nursery() as nursery:
            for replica, tokens in zip(replicas, waiting, strict=True):
                nursery.start_soon(tell, replica, tokens)
            await until(lambda: all(link.seconds_per_token is not UNKNOWN for link in engine._links))
            yield engine
            nursery.cancel_scope.cancel()


async def test_a_host_with_far_more_than_the_others_has_no_request_refused(make):
    """Rows go to the others. It may be one that says so only."""
    async with telling(*map(make, range(4)), waiting=(0, 10, 0, 2**40)) as engine:
        with engine.admit(EstimatedWork(tokens=5)):
            assert engine._admission.waiting_s == pytest.approx(LOAD_MARGIN * 5e-3 / 4)
            engine.refuse_late(EstimatedWork(tokens=5))


async def test_what_waits_at_all_hosts_has_requests_refused(make):
    async with telling(*map(make, range(4)), waiting=(9000, 10_000, 11_000, 10_000)) as engine:
        with engine.admit(EstimatedWork(tokens=5)):
            assert engine._admission.waiting_s == pytest.approx(LOAD_MARGIN * 10, rel=1e-2)
            with pytest.raises(OverloadedError):
                engine.refuse_late(EstimatedWork(tokens=5))


async def test_hosts_that_get_no_rows_count_as_no_capacity(make):
    async with telling(*map(make, range(4)), waiting=(0, 0, 0, 0)) as engine:
        assert engine._seconds_per_token()[0] == pytest.approx(1e-3 / 4)
        for link in engine._links[:3]:
            link.is_draining = True
        await until(lambda: engine._seconds_per_token()[0] == pytest.approx(1e-3))


async def test_a_drained_host_does_not_hide_that_all_others_stall(make):
    async with telling(*map(make, range(2)), waiting=(0, 0)) as engine:
        engine._links[0].is_draining = True
        assert engine.state == "ready"
        engine._links[1]._stall_reason = "a batch does not come back"
        assert engine.state == "stalled"


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
            await self.stream.send_all(frame_of(Answers([], 0, 0.0, UNKNOWN.tobytes())))
            await trio.sleep(0.05)

    async with replica.listen(), asking(replica) as engine, trio.open_nursery() as nursery:
        nursery.start_soon(read_slowly)
        await engine.wait_ready()
        nursery.start_soon(outcome_of, engine, request(*range(10**6)))
        await until(lambda: rows)
        assert rows == [4 * 10**6]
        assert engine._links[0].losses == 0
        nursery.cancel_scope.cancel()


# -- peers that misbehave --------------------------------------------------------------------------------


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
