"""How much processor time does an engine process take per row, besides its forward passes? Measured over its socket.

A ``DeviceServer`` behind a Unix socket as an engine process has it, with a runner whose vectors are there at once; the
rows come from another process. The CPU time is counted that the event loop's thread takes to receive, join, finish and
send a row, and that the API process takes to send the row and to receive its vector.

    python -m benchmarks.engine_rows
"""

import subprocess
import sys
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import cyclopts
import numpy as np
import numpy.typing as npt
import trio
from attrs import define, field, frozen
from cyclopts import Parameter

from benchmarks.report import RESULTS, Numbers, Report, open_steps, print_table
from benchmarks.rounds import Rounds
from benchmarks.servers import ROOT
from trio_pool_serve.engine.remote.device_server import DeviceServer
from trio_pool_serve.processes.allocator import freeze_objects
from trio_pool_serve.telemetry.metrics import Metrics
from trio_pool_serve.threads.offload import Offload
from trio_pool_serve.types import Batch, CopiedBatch, RunnerFacts

MAX_BATCH_TOKENS = 16384
"""As on a GPU."""

AT_A_TIME: Mapping[int, int] = {1: 64, 16: 32}
"""Requests at a time, by their rows."""


@Parameter(name="*")
@frozen(kw_only=True)
class Settings:
    """The settings: in each round ``total`` rows of ``tokens`` tokens, in requests of each number of ``rows``."""

    rounds: int = 5
    rows: Numbers = (1, 16, 328)
    tokens: int = 50
    dimensions: int = 384
    total: int = 32_800
    output_dir: Path = RESULTS


@frozen
class Cost:
    """Processor time per row: of the engine's event loop, of its other threads, and of the API process."""

    loop_us: float
    threads_us: float
    api_us: float


@define(eq=False)
class InstantRunner:
    """Computes nothing: the vectors of a batch are the rows of one array that is there already."""

    facts: RunnerFacts
    _vectors: npt.NDArray[np.float32] = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._vectors = np.ones((MAX_BATCH_TOKENS, self.facts.dimensions), np.float32)

    def launch(self, batch: Batch) -> CopiedBatch:
        """Return a vector for each row."""
        return CopiedBatch([(vector,) for vector in self._vectors[: len(batch.requests)]])

    def return_memory(self) -> None:
        """Do nothing."""


def instant(dimensions: int) -> InstantRunner:
    """Return a runner with the token budget of a GPU."""
    return InstantRunner(RunnerFacts(max_batch_tokens=MAX_BATCH_TOKENS, dimensions=dimensions, pads=False))


async def measure(settings: Settings, rows: int) -> Cost:
    """Return the cost of one row in requests of ``rows``."""
    server = DeviceServer(
        load=lambda: lambda _: instant(settings.dimensions), offload=Offload(launch=1), metrics=Metrics().of_engine("m")
    )
    with TemporaryDirectory() as folder:
        path = Path(folder) / "0.engine"
        listening = trio.socket.socket(trio.socket.AF_UNIX)
        await listening.bind(str(path))
        listening.listen()
        async with trio.open_nursery() as nursery, trio.SocketListener(listening) as listener:
            nursery.start_soon(server.run)
            await server.dispatcher.wait_ready()
            nursery.start_soon(trio.serve_listeners, server.serve, [listener])
            cost = await _measure(settings, rows, path)
            nursery.cancel_scope.cancel()
    return cost


async def _measure(settings: Settings, rows: int, path: Path) -> Cost:
    requests = max(1, settings.total // rows)
    arguments = {
        "socket": path,
        "rows-per-request": rows,
        "tokens": settings.tokens,
        "requests": requests,
        "at-a-time": AT_A_TIME.get(rows, 4),
    }
    command = [sys.executable, "-m", "benchmarks.row_sender"]
    command += [part for name, value in arguments.items() for part in (f"--{name}", str(value))]
    async with trio.open_nursery() as nursery:
        start = partial(trio.run_process, command, cwd=ROOT, stdout=subprocess.PIPE)
        process: trio.Process = await nursery.start(start)
        assert process.stdout is not None
        await _line_of(process.stdout)
        loop, everything = time.thread_time(), time.process_time()
        api_us = float(await _line_of(process.stdout))
        loop, everything = time.thread_time() - loop, time.process_time() - everything
    row_us = 1e6 / requests / rows
    return Cost(loop * row_us, (everything - loop) * row_us, api_us)


async def _line_of(stream: trio.abc.ReceiveStream) -> str:
    line = b""
    while not line.endswith(b"\n"):
        line += await stream.receive_some()
    return line.decode()


def main(settings: Settings = Settings()) -> None:
    """Measure the cost of a row by the number of rows of a request."""
    freeze_objects()  # as a server's processes do
    report = Report("engine_rows", settings)
    rounds: Rounds[int] = Rounds()
    with open_steps("rows", settings.rounds) as step:
        for number in range(settings.rounds):
            step(f"round {number + 1}")
            for rows in settings.rows:
                rounds.add(rows, trio.run(measure, settings, rows))
    table = [
        [str(rows), *(f"{rounds.median(rows, quantity):.1f}" for quantity in ("loop_us", "threads_us", "api_us"))]
        for rows in settings.rows
    ]
    columns = ["rows of a request", "engine's event loop", "its other threads", "API process"]
    print_table("Processor time per row, µs", columns, table)
    report.write(costs=rounds.as_document("rows"))


if __name__ == "__main__":
    cyclopts.run(main)
