"""The load generator for overload counts how each request ended."""

import socket

import attrs
import pytest

from benchmarks.open_loop import OpenLoopJob, counts, merged, run_open_loop
from tests.load.raw_server import answering, raw_server, reset
from trio_pool_serve.load.client_connection import CUT, NO_CONNECTION, RESET, TIMEOUT

ANSWER = b"HTTP/1.1 %s\r\ncontent-length: 2\r\n%s\r\nok"


@pytest.mark.parametrize(
    ("respond", "outcome"),
    [
        (answering(ANSWER % (b"200 OK", b"")), "200"),
        (answering(ANSWER % (b"429 Busy", b"Retry-After: 1\r\n")), "429"),
        (answering(b""), CUT),
        (answering(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nok", b""), CUT),
        (reset, RESET),
        (answering(), TIMEOUT),
    ],
    ids=["answered", "refused", "closed", "cut off", "reset", "silent"],
)
async def test_each_request_is_counted_by_how_it_ended(respond, outcome):
    async with raw_server(respond) as server:
        job = OpenLoopJob(port=server.port, bodies=["{}"], per_s=50, seconds=0.2, timeout_s=0.5)
        result = await run_open_loop(job)
    assert counts(result) == {outcome: 10}
    assert result.offered == result.wanted == 10
    assert result.without_retry_after == 0
    assert result.goodput == (50 if outcome == "200" else 0)


async def test_a_port_at_which_nobody_listens_is_no_connection():
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
    result = await run_open_loop(OpenLoopJob(port=port, per_s=50, seconds=0.1))
    assert counts(result) == {NO_CONNECTION: 5}


async def test_a_refusal_without_retry_after_is_noticed():
    async with raw_server(answering(ANSWER % (b"429 Busy", b""))) as server:
        result = await run_open_loop(OpenLoopJob(port=server.port, per_s=50, seconds=0.1))
    assert result.without_retry_after == 5
    again = attrs.evolve(result, outcomes={name: [*taken] for name, taken in result.outcomes.items()}, late_s=[])
    both = merged([result, again])
    assert both.without_retry_after == 10
    assert both.count("429") == 10
