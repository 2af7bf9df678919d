"""What a running server holds: its memory, its metrics, and what ``/load`` says that it still has to do."""

import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import httpx
import psutil
import trio
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from benchmarks.servers import Server
from benchmarks.thread_clocks import process_tree

SETTLE_S = 60.0
"""A server that still has work after this time without clients counts as not settled."""


def resident_mib(server: Server) -> float:
    """Return the resident memory of all of the server's processes together."""
    total = 0
    for pid in process_tree(server.pid):
        with suppress(psutil.Error):
            total += psutil.Process(pid).memory_info().rss
    return total / 2**20


@asynccontextmanager
async def watch_memory(server: Server, *, every_s: float = 1.0) -> AsyncIterator[list[tuple[float, float]]]:
    """Sample the server's resident memory for as long as the block: seconds since its begin, and MiB."""
    began = trio.current_time()
    samples: list[tuple[float, float]] = []

    async def watch() -> None:
        while True:
            samples.append((trio.current_time() - began, resident_mib(server)))
            await trio.sleep(every_s)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(watch)
        yield samples
        nursery.cancel_scope.cancel(reason="the block is left")


async def samples_of(server: Server, *names: str) -> list[Sample]:
    """Return the samples of some of the server's metrics, read at one time. Cancellation: at once."""
    async with httpx.AsyncClient(trust_env=False, timeout=SETTLE_S) as client:
        text = (await client.get(f"{server.url}/metrics")).raise_for_status().text
    samples = itertools.chain.from_iterable(family.samples for family in text_string_to_metric_families(text))
    return [sample for sample in samples if sample.name in names]


async def total_of(server: Server, name: str, **labels: str) -> float:
    """Return the sum of a metric's samples that have these labels. Cancellation: at once."""
    samples = await samples_of(server, name)
    return sum([sample.value for sample in samples if labels.items() <= sample.labels.items()])


async def wait_idle(server: Server) -> bool:
    """Return whether the server has nothing left to do within ``SETTLE_S``. Cancellation: at once."""
    async with httpx.AsyncClient(trust_env=False, timeout=SETTLE_S) as client:
        with trio.move_on_after(SETTLE_S):
            while busy_of((await client.get(f"{server.url}/load")).json()):  # noqa: ASYNC110  (another process)
                await trio.sleep(0.1)
            return True
    return False


def busy_of(load: Any, path: str = "") -> dict[str, float]:
    """Return what ``/load`` says is going on: everything that is 0 in a server without requests, and is not."""
    idle_at_zero = {
        *("server_load", "queued_rows", "queued_tokens", "in_flight_batches", "admitted_tokens"),
        *("borrowed", "waiting", "in_flight", "waiting_s", "request_memory_bytes"),
    }
    found: dict[str, float] = {}
    for name, value in load.items():
        if isinstance(value, dict):
            found |= busy_of(value, f"{path}{name} ")
        elif name in idle_at_zero and value:
            found[path + name] = value
    return found
