import os
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from tests.server.server_process import until
from trio_pool_serve.telemetry.metrics import Metrics
from trio_pool_serve.telemetry.snapshots import (
    SUFFIX,
    Snapshot,
    exposition_of,
    families_of,
    gather_snapshots,
    merged_load,
    own_socket,
    serve_snapshots,
)

pytestmark = pytest.mark.unit


def snapshot(requests: int, *, oldest_s: float, state: str) -> Snapshot:
    metrics = Metrics()
    metrics.requests.inc(requests)
    metrics.of_engine("m").batch_rows.observe(requests)
    gauges = {"engine": {"queued_rows": requests, "oldest_in_flight_seconds": oldest_s, "waiting_seconds": requests}}
    metrics.of_engine("m").add_gauges(lambda: gauges)
    metrics.add_gauges(lambda: {"process": {"count": 1, "start_time_seconds": 1000 + requests}})
    load = {"models": {"m": {"state": state, "queued_rows": requests, "oldest_in_flight_s": oldest_s}}}
    return Snapshot(families_of(metrics.registry), load)


def values_of(text: bytes) -> dict[tuple[str, ...], float]:
    return {
        (sample.name, *(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    }


def test_numbers_are_added_up_and_of_ages_the_greatest_counts_and_the_first_start():
    both = [snapshot(3, oldest_s=0.5, state="ready"), snapshot(4, oldest_s=0.25, state="loading")]
    values = values_of(exposition_of(both))
    assert values["trio_pool_serve_requests_total",] == 7
    assert values["trio_pool_serve_batch_rows_sum", "m"] == 7
    assert values["trio_pool_serve_batch_rows_bucket", "4.0", "m"] == 2
    assert values["trio_pool_serve_engine", "m", "queued_rows"] == 7
    assert values["trio_pool_serve_engine", "m", "oldest_in_flight_seconds"] == 0.5
    assert values["trio_pool_serve_engine", "m", "waiting_seconds"] == 4
    assert values["trio_pool_serve_process", "count"] == 2
    assert values["trio_pool_serve_process", "start_time_seconds"] == 1003
    assert merged_load(both) == {"models": {"m": {"state": "loading", "queued_rows": 7, "oldest_in_flight_s": 0.5}}}


def test_the_metrics_of_one_process_equal_its_registry_s():
    metrics = Metrics()
    metrics.requests.inc(5)
    metrics.of_engine("m").forward.observe(0.1)
    merged = exposition_of([Snapshot(families_of(metrics.registry), {})])
    assert values_of(merged) == values_of(generate_latest(metrics.registry))


@asynccontextmanager
async def another(folder: Path, monkeypatch, take: Callable[[], Snapshot]) -> AsyncIterator[None]:
    """A process with another number, as far as the socket's name goes."""
    with monkeypatch.context() as patched:
        patched.setattr(os, "getpid", lambda: 999_999)
        path = own_socket(folder)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(serve_snapshots, folder, take)
            await until(lambda: path.exists())
            patched.undo()
            yield
            nursery.cancel_scope.cancel()


async def test_other_processes_are_asked_and_dead_ones_are_left_out(tmp_path, monkeypatch):
    said = snapshot(3, oldest_s=0, state="ready")
    with trio.socket.socket(trio.socket.AF_UNIX) as dead:
        await dead.bind(str(tmp_path / f"1{SUFFIX}"))
    async with another(tmp_path, monkeypatch, lambda: said):
        (found,) = await gather_snapshots(tmp_path)
    assert found == said
    assert not (tmp_path / f"1{SUFFIX}").exists()


async def test_a_process_whose_snapshot_cannot_be_encoded_is_left_out_and_goes_on(tmp_path, monkeypatch, caplog):
    good = snapshot(3, oldest_s=0, state="ready")
    said = [Snapshot([], {"a": object()}), Snapshot([], {"a\ud800": 2**70}), good]
    async with another(tmp_path, monkeypatch, lambda: said.pop(0)):
        assert await gather_snapshots(tmp_path) == []
        assert await gather_snapshots(tmp_path) == []
        assert await gather_snapshots(tmp_path) == [good]
        assert await gather_snapshots(tmp_path) == [], "pop from an empty list"
    assert caplog.text.count("a snapshot cannot be sent") == 3


@pytest.mark.parametrize("garbage", [b"", b"\xc1" * 100, struct.pack("<IQ", 2**32 - 1, 2**64 - 1), b"\x05\0\0"])
async def test_a_process_that_answers_with_garbage_is_left_out(tmp_path, monkeypatch, garbage):
    said = snapshot(3, oldest_s=0, state="ready")

    async def answer(stream: trio.SocketStream) -> None:
        async with stream:
            await stream.send_all(garbage)

    with trio.socket.socket(trio.socket.AF_UNIX) as listening:
        await listening.bind(str(tmp_path / f"1{SUFFIX}"))
        listening.listen()
        async with another(tmp_path, monkeypatch, lambda: said), trio.open_nursery() as nursery:
            nursery.start_soon(trio.serve_listeners, answer, [trio.SocketListener(listening)])
            assert await gather_snapshots(tmp_path) == [said]
            nursery.cancel_scope.cancel()
