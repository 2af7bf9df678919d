"""The API process of ``engine_rows``: sends rows to an engine process, and counts its own processor time.

It writes a line when it begins, and its processor time per row, in µs, when it has ended.
"""

import itertools
import time
from pathlib import Path
from typing import Annotated

import cyclopts
import numpy as np
import trio
from attrs import frozen
from cyclopts import Parameter

from tests.engine.engines import linked_engine
from trio_pool_serve.engine.remote.connectors import unix_connector
from trio_pool_serve.processes.allocator import freeze_objects
from trio_pool_serve.types import Embed, PoolingRequest, RenderedPrompt

CLIENTS = 4
"""Numbers of clients, which take turns in the queue."""

PARAMS = (Embed(),)

TIMEOUT_S = 60.0
"""Of each request: none is late."""


@Parameter(name="*")
@frozen(kw_only=True)
class Settings:
    """The settings: ``requests`` of ``rows`` rows, as many at a time as ``at_a_time``, after a tenth to warm up."""

    socket: Path
    rows: Annotated[int, Parameter(name="--rows-per-request")]
    tokens: int
    requests: int
    at_a_time: int


async def send(settings: Settings) -> None:
    """Send everything, and report."""
    engine = linked_engine([unix_connector(settings.socket)])
    groups = itertools.count(1)
    prompts = [RenderedPrompt(np.arange(settings.tokens, dtype=np.int32)) for _ in range(settings.rows)]

    async def ask(numbers: "itertools.islice[int]") -> None:
        for group in numbers:
            deadline = trio.current_time() + TIMEOUT_S
            outputs = await engine.submit_all(
                [PoolingRequest(prompt, PARAMS, 0, group, group % CLIENTS, 0, deadline) for prompt in prompts]
            )
            assert len(outputs) == settings.rows

    async def send_all(requests: int) -> None:
        numbers = itertools.islice(groups, requests)
        async with trio.open_nursery() as nursery:
            for _ in range(settings.at_a_time):
                nursery.start_soon(ask, numbers)

    async with trio.open_nursery() as nursery:
        await nursery.start(engine.run)
        await engine.wait_ready()
        await send_all(settings.requests // 10 + 1)
        print("begins", flush=True)
        began = time.process_time()
        await send_all(settings.requests)
        print(1e6 * (time.process_time() - began) / settings.requests / settings.rows, flush=True)
        nursery.cancel_scope.cancel()


def send_rows(settings: Settings) -> None:
    """Send rows to an engine process."""
    freeze_objects()  # as a server's processes do
    trio.run(send, settings)


if __name__ == "__main__":
    cyclopts.run(send_rows)
