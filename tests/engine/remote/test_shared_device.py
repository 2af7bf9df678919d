"""Several API processes at one device, and one at several, in virtual time."""

from collections import Counter
from contextlib import ExitStack, suppress
from random import Random

import numpy as np
import pytest
import trio
from msgspec.structs import replace
from trio.testing import MockClock

from tests.engine.remote.replicas import outcome_of
from tests.engine.remote.simulation import LateLoop, SimulatedRunner, row, simulated
from tests.engine.virtual_time import patch_time
from trio_pool_serve.engine.admission import EstimatedWork
from trio_pool_serve.engine.engine import Engine
from trio_pool_serve.engine.remote.device_server import HEARTBEAT_S
from trio_pool_serve.engine.remote.wire import CREDITS, Answers, Submit
from trio_pool_serve.errors import BatchFailedError, EngineDeadError, OverloadedError
from trio_pool_serve.types import Batch, Client, ImageFeatures, PoolingOutput

pytestmark = pytest.mark.unit

BATCH_TOKENS = 2048

ROW_TOKENS = 256
"""Eight are a batch."""

blocks_or_not = pytest.mark.parametrize("launches_block", [True, False], ids=["CPU", "GPU"])


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> MockClock:
    """Return the clock that the test runs by."""
    patch_time(monkeypatch)
    return MockClock(autojump_threshold=0)


async def rows_per_s(*clients: int, launches_block: bool, stopped_s: float = 0.0) -> float:
    """Return the rows/s of API processes with so many closed-loop clients; ``stopped_s`` is the first one's."""
    async with simulated() as simulation:
        await simulation.add_device(SimulatedRunner(), launches_block=launches_block)
        for index, number in enumerate(clients):
            engine = await simulation.add_process(LateLoop(index, stopped_s=0.0 if index else stopped_s))
            for _ in range(number):
                simulation.nursery.start_soon(simulation.ask_again, engine, ROW_TOKENS)
        await trio.sleep(0.3)
        before = simulation.answered
        await trio.sleep(1.5)
        return (simulation.answered - before) / 1.5


@blocks_or_not
@pytest.mark.parametrize(
    ("clients", "stopped_s"), [((16,) * 4, 0.02), ((64, 0, 0, 0), 0.0)], ids=["one is stopped", "three are idle"]
)
async def test_several_api_processes_keep_a_device_as_busy_as_one(clock, clients, stopped_s, launches_block):
    alone = await rows_per_s(sum(clients), launches_block=launches_block)
    assert await rows_per_s(*clients, launches_block=launches_block, stopped_s=stopped_s) >= 0.97 * alone


async def test_a_lone_request_crosses_twice(clock):
    async with simulated() as simulation:
        await simulation.add_device(SimulatedRunner())
        engine, _ = [await simulation.add_process() for _ in range(2)]
        await engine.submit(row(5))
        stream = engine.devices.links[0].connector.stream
        assert [type(message) for message in stream.sent] == [Submit]
        assert sum(isinstance(message, Answers) and bool(message.parts or message.done) for message in stream.got) == 1


@blocks_or_not
async def test_a_row_beside_thousands_of_another_process_is_in_the_first_pass_after_it_came(clock, launches_block):
    async with simulated() as simulation:
        await simulation.add_device(runner := SimulatedRunner(), launches_block=launches_block)
        flood, other = [await simulation.add_process() for _ in range(2)]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(flood.submit_all, [row(16) for _ in range(4000)])
            for token in range(2, 12):
                await trio.sleep(0.0171)
                launched = len(runner.batches)
                await other.submit(row(16, token))
                assert token in runner.passes[launched]
        assert sum(runner.rows) == 4010


async def test_texts_images_and_token_embeddings_of_several_processes_are_not_joined(clock):
    image = ImageFeatures({"pixel_values": np.ones((1, 4, 4), np.float32)}, (4,))
    async with simulated() as simulation:
        await simulation.add_device(runner := SimulatedRunner(embeds_width=2), launches_block=True)
        engines = [await simulation.add_process() for _ in range(3)]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(engines[0].submit, row(1))
            await trio.sleep(0.001)  # the others wait together
            for engine, prompt in zip(
                engines, ({}, {"images": image}, {"embeds": np.ones((32, 2), np.float32)}), strict=True
            ):
                nursery.start_soon(engine.submit_all, [row(32, **prompt)] * 2)
        assert [len(batch.requests) for batch in runner.batches] == [1, 2, 2, 2]


@pytest.mark.parametrize("launches", [1, 2])
async def test_there_are_no_more_batches_of_an_api_process_than_it_has_credits(clock, launches):
    at_a_time: set[int] = set()
    async with simulated() as simulation:
        server = await simulation.add_device(SimulatedRunner(concurrent_launches=launches), launches_block=True)
        engine = await simulation.add_process()
        (connection,) = server.connections
        async with trio.open_nursery() as nursery:
            nursery.start_soon(engine.submit_all, [row(ROW_TOKENS)] * 100)
            for _ in range(20):
                await trio.sleep(0.005)  # a pass takes 13 ms
                at_a_time.add(len(connection.batches))
    assert max(at_a_time) == CREDITS * launches


async def test_a_row_that_fails_in_a_joined_batch_fails_alone_and_costs_the_other_process_one_pass(clock):
    poison, outcomes = 666, list[PoolingOutput | Exception]()

    def fail(batch: Batch) -> None:
        if any(poison in request.prompt.token_ids for request in batch.requests):
            raise ValueError("poison")

    async def ask(engine: Engine, token: int) -> None:
        outcomes.append(await outcome_of(engine, row(16, token)))

    async with simulated() as simulation:
        await simulation.add_device(runner := SimulatedRunner(on_launch=fail), launches_block=True)
        guilty, other = [await simulation.add_process() for _ in range(2)]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(guilty.submit, row(1))
            await trio.sleep(0.001)  # the others wait together
            for token in (*[5] * 3, poison, *[5] * 4):
                nursery.start_soon(ask, guilty, token)
            nursery.start_soon(other.submit_all, [row(16, 7)] * 8)
        assert Counter(map(type, outcomes)) == {PoolingOutput: 7, BatchFailedError: 1}
        assert [len(tokens) for tokens in runner.passes if 7 in tokens] == [16, 8]


@blocks_or_not
@pytest.mark.parametrize("state", ["waiting", "computing", "answered"])
async def test_a_process_that_dies_leaves_neither_rows_nor_credits_behind(clock, state, launches_block):
    async with simulated() as simulation:
        server = await simulation.add_device(runner := SimulatedRunner(), launches_block=launches_block)
        other = await simulation.add_process()
        dying = await simulation.add_process()
        failed: list[Exception] = []

        async def ask(tokens: int) -> None:
            with pytest.raises(EngineDeadError) as raised:
                await dying.submit_all([row(tokens, 2)] * 8)
            failed.append(raised.value)

        async with trio.open_nursery() as nursery:
            if state == "waiting":
                for _ in range(2):  # as many as are launched at a time
                    nursery.start_soon(other.submit_all, [row(ROW_TOKENS)] * 8)
                    await trio.sleep(0.001)
            nursery.start_soon(ask, ROW_TOKENS)
            await trio.sleep(0.001)
            nursery.start_soon(other.submit_all, [row(ROW_TOKENS)] * 8)
            if state == "answered":
                dying.devices.links[0].connector.loop.stopped_s = 0.1
                await trio.sleep(0.02)  # a pass takes 13 ms
            waiting = server.joiner._batches
            connection = [*server.connections][1]
            where = {
                "waiting": any(2 in [entry.request.prompt.token_ids[-1] for entry in batch.rows] for batch in waiting),
                "computing": bool(connection._waiting) and 2 in runner.passes[0],
                "answered": not connection._waiting and bool(dying.devices.links[0]._waiting),
            }
            assert where[state]
            simulation.kill(dying)
        assert len(failed) == 1
        assert state != "waiting" or not any(2 in tokens for tokens in runner.passes)
        await trio.sleep(0.1)
        assert len(server.connections) == 1
        assert len(server.joiner) == server.joiner.tokens == len(server.dispatcher.in_flight) == 0
        again = await simulation.add_process()
        assert again.devices.links[0].room == other.devices.links[0].room == CREDITS
        assert len(await again.submit_all([row(ROW_TOKENS)] * 40)) == 40


async def test_a_process_with_few_rows_beside_a_busy_one_knows_how_fast_the_device_is(clock):
    async with simulated() as simulation:
        await simulation.add_device(SimulatedRunner(token_s=1e-4), launches_block=True)
        busy, other = [await simulation.add_process() for _ in range(2)]
        for _ in range(64):
            simulation.nursery.start_soon(simulation.ask_again, busy, ROW_TOKENS)
        for _ in range(6):
            await trio.sleep(0.5)
            await other.submit_all([row(ROW_TOKENS)] * 2)
        share = other.devices.links[0].answers.others_share
        assert other.queue.rates.shared[0] == pytest.approx(1e-4 * (1 + share), rel=0.3)


async def test_each_is_told_how_much_others_compute_while_its_rows_wait(clock):
    """At once if another has admitted far more, even in one request."""
    async with simulated() as simulation:
        await simulation.add_device(SimulatedRunner())
        much, little, none = engines = [await simulation.add_process() for _ in range(3)]
        with ExitStack() as admitted:
            for number, (engine, tokens) in enumerate(((much, 40_000), (much, 40_000), (little, 20_000))):
                work = EstimatedWork(tokens=tokens, client=Client(str(number)))
                admitted.enter_context(engine.admit(work))
            await trio.sleep(HEARTBEAT_S / 10)
            assert none.devices.links[0].answers.others_share == 3
            for engine in engines:
                await engine.submit(row(5))
            await trio.sleep(HEARTBEAT_S)
            # A turn for each client, and meanwhile as much again may arrive as waits.
            assert [engine.devices.links[0].answers.others_share for engine in engines] == [0.5, 2, 3]


async def test_a_process_whose_rows_are_all_answered_has_no_share(clock):
    async with simulated() as simulation:
        await simulation.add_device(SimulatedRunner())
        idle, busy = [await simulation.add_process() for _ in range(2)]
        with idle.admit(EstimatedWork(tokens=BATCH_TOKENS // 2)):
            for engine in (idle, busy):
                await engine.submit(row(5))
            assert busy.devices.links[0].answers.others_share == 0


async def test_each_is_told_what_is_computed_for_others(clock):
    async with simulated() as simulation:
        await simulation.add_device(SimulatedRunner())
        first, second = engines = [await simulation.add_process() for _ in range(2)]
        for engine, tokens in ((first, 2), (second, 3), (second, 1), (first, 1)):
            await engine.submit(row(tokens))
        assert [engine.devices.links[0].answers.computed_tokens for engine in engines] == [7, 6]
        assert [engine.devices.links[0].answers.others_small_requests for engine in engines] == [2, 1]


@pytest.mark.parametrize("processes", [1, 4])
async def test_requests_admitted_in_a_flood_are_computed_in_time(clock, processes):
    capacity = 1 / (0.003 + ROW_TOKENS * 1e-4)
    answered_s: list[float] = []

    async def ask(engine: Engine, client: Client) -> None:
        began, request = trio.current_time(), row(ROW_TOKENS, client=client.number)
        with (
            suppress(OverloadedError),
            engine.queue.admission.admit(EstimatedWork(tokens=ROW_TOKENS, client=client)) as admitted,
        ):
            admitted.note_rendered([request.prompt], 1)
            await engine.submit(request)
            answered_s.append(trio.current_time() - began)

    async with simulated() as simulation:
        await simulation.add_device(SimulatedRunner(token_s=1e-4), launches_block=True)
        engines = [await simulation.add_process(LateLoop(index)) for index in range(processes)]
        clients, draws = [Client(str(number)) for number in range(8)], Random(1)
        async with trio.open_nursery() as nursery:
            for _ in range(20):  # from which processes know the speed of the device
                for engine in engines:
                    nursery.start_soon(engine.submit, row(ROW_TOKENS))
        async with trio.open_nursery() as nursery:
            for _ in range(round(10 * 5 * capacity)):
                nursery.start_soon(ask, draws.choice(engines), draws.choice(clients))
                await trio.sleep(draws.expovariate(5 * capacity))
    # A second more than is promised: these are a few hundred requests, each an eighth of a batch.
    assert np.quantile(answered_s, 0.99) <= engines[0].queue.admission.max_queue_s + 2
    assert len(answered_s) >= 0.95 * 10 * capacity


@pytest.mark.parametrize("processes", [1, 4])
async def test_devices_get_rows_by_their_speeds_and_a_lone_row_goes_to_the_fast_one(clock, processes):
    async with simulated() as simulation:
        fast, slow = SimulatedRunner(), SimulatedRunner(constant_s=0.012, token_s=2e-5)
        for runner in (fast, slow):
            await simulation.add_device(runner)
        engines = [await simulation.add_process() for _ in range(processes)]
        async with trio.open_nursery() as nursery:
            for index in range(160):
                nursery.start_soon(simulation.ask_again, engines[index % processes], ROW_TOKENS)
            await trio.sleep(0.5)
            fast.batches.clear()
            slow.batches.clear()
            await trio.sleep(2)
            nursery.cancel_scope.cancel()
        of_fast, of_slow = sum(fast.rows), sum(slow.rows)
        assert of_slow / (of_fast + of_slow) == pytest.approx(0.2, rel=0.1)
        await trio.sleep(1)
        slow.batches.clear()
        for index in range(200):
            await engines[index % processes].submit(row(ROW_TOKENS))
        async with trio.open_nursery() as nursery:
            for _ in range(3):  # the last one waits for the fast device
                nursery.start_soon(engines[0].submit, row(ROW_TOKENS))
                await trio.sleep(0.001)
        assert not slow.batches


async def test_a_process_measures_its_own_rows_in_passes_with_those_of_others(clock):
    async with simulated() as simulation:
        await simulation.add_device(SimulatedRunner(token_s=5e-5), launches_block=True)
        flooding, own = await simulation.add_process(), await simulation.add_process()
        async with trio.open_nursery() as nursery:
            for _ in range(64):
                nursery.start_soon(simulation.ask_again, flooding, ROW_TOKENS)
            for rows in (1, 2, 4):
                for _ in range(20):
                    await own.submit_all([row(ROW_TOKENS)] * rows)
            nursery.cancel_scope.cancel()
        (link,) = own.devices.links
        assert link.passes.short_tokens <= 0.02 / 5e-5, "a pass of 20 ms"
        assert link.passes.token_s == pytest.approx(5e-5, rel=0.2)


async def test_a_draining_device_does_not_make_the_others_look_idle(clock):
    async with simulated() as simulation:
        await simulation.add_device(SimulatedRunner())
        flooding = await simulation.add_process()  # on the first device only
        await simulation.add_device(SimulatedRunner())
        own = await simulation.add_process()
        own.devices.links[1].is_draining = True
        with flooding.admit(EstimatedWork(tokens=100 * BATCH_TOKENS)):
            await flooding.submit(row(5))
            await own.submit(row(5))
            await trio.sleep(2 * HEARTBEAT_S)
            busy, idle = [link.answers.others_share for link in own.devices.links]
            assert busy > idle == 0
            assert own.queue.rates._others_share == busy


async def test_after_a_connection_is_made_again_a_device_server_is_told_what_waits(clock):
    """Not for each request: once the tokens that wait have doubled since the last message."""
    async with simulated() as simulation:
        server = await simulation.add_device(SimulatedRunner())
        engine = await simulation.add_process()
        with engine.admit(EstimatedWork(tokens=100 * BATCH_TOKENS)):
            with engine.admit(EstimatedWork(tokens=1)):
                await trio.sleep(0.1)
            (connection,) = server.connections
            assert connection.queue.tokens == 100 * BATCH_TOKENS + 1
            await connection.stream.stream.aclose()
            await trio.sleep(1.0)
            (again,) = server.connections
            assert again is not connection
            with engine.admit(EstimatedWork(tokens=1)):
                await trio.sleep(0.1)
            assert again.queue.tokens == 100 * BATCH_TOKENS + 1


async def median_beside_floods(processes: int) -> float:
    """Return the median seconds of single rows, while each process also computes requests of a thousand rows."""
    answered_s: list[float] = []

    async def flood(engine: Engine, number: int) -> None:
        work = EstimatedWork(tokens=64_000, rows=1000, client=Client(str(number)))
        while True:
            with engine.admit(work):
                await engine.submit_all([replace(row(64, client=number), group=1 + number)] * 1000)

    async def ask_singles(engine: Engine, number: int) -> None:
        while True:
            began = trio.current_time()
            await engine.submit(row(16, client=100 + number))
            answered_s.append(trio.current_time() - began)
            await trio.sleep(0.01)

    async with simulated() as simulation:
        await simulation.add_device(SimulatedRunner(constant_s=0.002, token_s=2e-5, default_batch_tokens=8192))
        for number in range(processes):
            engine = await simulation.add_process()
            simulation.nursery.start_soon(flood, engine, number)
            simulation.nursery.start_soon(ask_singles, engine, number)
        await trio.sleep(2)  # until passes are measured
        answered_s.clear()
        await trio.sleep(2)
    return float(np.median(answered_s))


async def test_a_pass_with_long_work_of_several_processes_is_as_short_as_one_of_a_single_process(clock):
    assert await median_beside_floods(4) <= 1.5 * await median_beside_floods(1)
