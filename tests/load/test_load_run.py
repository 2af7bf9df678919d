"""Loads: when requests begin, and how they are counted."""

from typing import Any

import pytest
import trio
import trio.testing

from tests.load.raw_server import ANSWER, RawServer, answering, raw_server
from trio_pool_serve.load.client_connection import CUT, NO_CONNECTION, NOT_HTTP, TIMEOUT, Target, request_bytes
from trio_pool_serve.load.load_run import LoadPlan, LoadRun, quantile

REQUESTS = [request_bytes("/", body) for body in (b"one", b"two", b"three")]


def load_of(server: RawServer | Target, **plan: Any) -> LoadRun:
    target = server if isinstance(server, Target) else server.target
    return LoadRun(LoadPlan(target=target, requests=REQUESTS, **plan))


async def test_clients_of_a_closed_loop_wait_for_their_responses():
    most = 0

    async def respond(_: RawServer, stream: trio.SocketStream) -> None:
        nonlocal most
        most = max(most, run.in_flight)
        await stream.send_all(ANSWER)

    async with raw_server(respond) as server:
        run = load_of(server, clients=3, seconds=0.2)
        await run.run()
        assert most == server.connections == 3
        assert len(run.latencies) == len(server.requests) > 3
        assert {request.rpartition(b"\r\n")[2] for request in server.requests} == {b"one", b"two", b"three"}
        assert 0 < run.finished <= len(run.latencies)


async def test_an_open_loop_does_not_wait_and_counts_a_stall_from_when_requests_were_to_begin():
    """A closed loop would send one request into the stall, and see one slow response: coordinated omission."""
    stall_s = 0.4
    resumes = trio.Event()

    async def respond(server: RawServer, stream: trio.SocketStream) -> None:
        if len(server.requests) == 1:
            await trio.sleep(stall_s)
            resumes.set()
        await resumes.wait()
        await stream.send_all(ANSWER)

    async with raw_server(respond) as server:
        run = load_of(server, per_s=100, seconds=0.8)
        await run.run()
    assert len(run.latencies) == 80
    assert sorted(run.latencies)[-1] >= stall_s * 0.99
    slow = [latency for latency in run.latencies if latency > stall_s / 2]
    assert len(slow) >= 15, "of the forty that were to begin in the stall, those of its first half"


async def test_random_arrivals_are_the_same_with_the_same_seed_and_as_many_on_average():
    counts = []
    for seed in (1, 1, 2):
        with trio.fail_after(60):
            async with raw_server(answering(ANSWER)) as server:
                run = load_of(server, per_s=200, poisson=True, seed=seed, seconds=0.5)
                await run.run()
                counts.append(len(run.latencies))
    assert counts[0] == pytest.approx(counts[1], abs=2)  # the last ones are at the end
    assert all(60 < count < 140 for count in counts)


@pytest.mark.parametrize(
    ("respond", "outcome"),
    [
        (answering(b"HTTP/1.1 503 Busy\r\nContent-Length: 4\r\n\r\nbusy"), "503"),
        (answering(b""), CUT),
        (answering(b"hello\r\n\r\n"), NOT_HTTP),
        (answering(), TIMEOUT),
    ],
    ids=["status", "cut off", "not HTTP", "silent"],
)
@pytest.mark.parametrize("loop", [{"clients": 2}, {"per_s": 50}], ids=["closed", "open"])
async def test_requests_that_fail_are_counted_and_end_nothing(respond, outcome: str, loop: dict[str, Any]):
    async with raw_server(respond) as server:
        timeout_s = 0.1 if outcome == TIMEOUT else 60.0
        run = load_of(server, seconds=0.2, timeout_s=timeout_s, **loop)
        await run.run()
        assert set(run.outcomes) == {outcome}
        assert len(run.outcomes[outcome]) == len(server.requests) > 0
        assert run.reasons[outcome] == "busy" if outcome == "503" else run.reasons[outcome]
    assert run.finished == 0
    assert run.latencies == []


async def test_a_port_at_which_nobody_listens_is_no_connection():
    async with raw_server(answering()) as server:
        target = server.target
    run = load_of(target, per_s=50, seconds=0.1)
    await run.run()
    assert {name: len(latencies) for name, latencies in run.outcomes.items()} == {NO_CONNECTION: 5}


async def test_a_connection_that_the_server_has_closed_in_between_is_no_failure():
    async with raw_server(answering(ANSWER, b"")) as server:
        run = load_of(server, clients=1, seconds=0.2)
        await run.run()
        assert set(run.outcomes) == {"200"}
        assert server.connections == len(run.latencies) > 1


async def test_what_on_failure_raises_ends_the_run():
    def stop(outcome: str, reason: str) -> None:
        raise ValueError(outcome, reason)

    async with raw_server(answering(b"HTTP/1.1 500 No\r\nContent-Length: 0\r\n\r\n")) as server:
        run = LoadRun(LoadPlan(target=server.target, requests=REQUESTS, clients=1, seconds=60), on_failure=stop)
        with pytest.RaisesGroup(ValueError, flatten_subgroups=True, allow_unwrapped=True):
            await run.run()


async def test_a_run_that_is_cancelled_keeps_what_it_has_counted():
    async def respond(server: RawServer, stream: trio.SocketStream) -> None:
        if len(server.requests) <= 10:
            await stream.send_all(ANSWER)
        if len(server.requests) == 12:
            scope.cancel()

    with trio.CancelScope() as scope:
        async with raw_server(respond) as server:
            run = load_of(server, clients=2, seconds=60)
            await run.run()
    assert scope.cancelled_caught
    assert len(run.latencies) == 10
    assert run.unfinished == 2
    assert run.measured_s < 60


@pytest.mark.unit
def test_requests_count_with_the_share_of_their_time_that_is_measured():
    run = load_of(Target(host="", port=0))
    run.begin, run.end = 10.0, 14.0
    for due, now, counted in ((11, 12, 1), (9, 11, 0.5), (13, 15, 0.5), (8, 16, 0.5), (8, 9, 0), (8, 10, 0)):
        before = run.finished
        run.count(due, now)
        assert run.finished - before == pytest.approx(counted)
    assert run.latencies == [1, 2, 2, 8, 2]


@pytest.mark.unit
def test_quantiles_are_values_that_were_seen():
    assert [quantile([3.0, 1.0, 2.0], share) for share in (0.5, 1.0)] == [2.0, 3.0]
    assert quantile([], 0.5) != quantile([], 0.5), "NaN"
