"""How long do interactive requests wait beside a batch, and how much of the rest does the batch get.

One server. In each round: requests of a text each at random times, the same with and without a batch of the Batch API
in progress; and a batch without them. What the requests leave is the share of the cores' time that neither the server
nor the clients took without a batch, times the rows per second of a batch alone.

    python -m benchmarks.beside_a_batch
"""

import json
import os
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from statistics import median
from typing import Any

import cyclopts
import httpx
import psutil
import trio
from attrs import define, field, frozen
from cyclopts import Parameter

from benchmarks.model import MODEL_NAME, Texts
from benchmarks.open_loop import OpenLoopJob, OpenLoopResult, run_open_loop
from benchmarks.report import RESULTS, Flags, Report, command_of, open_figure, open_steps, print_table, write_figure
from benchmarks.server_state import wait_idle
from benchmarks.servers import Server, open_ours
from benchmarks.thread_clocks import process_tree

TOKENS = 34

BATCH_TOKENS = (8, 16, 34, 64, 128)
"""Tokens of the texts of a batch, which are as mixed as a corpus."""

BEGIN_TIMEOUT_S = 120.0
"""For checking the lines of a batch, and for the first that are computed."""


@Parameter(name="*")
@frozen(kw_only=True)
class Settings:
    """The settings: ``per_s`` requests a second for ``seconds`` in each phase, and a batch of ``lines``.

    A batch is cancelled before it ends. ``flags`` are the server's.
    """

    rounds: int = 5
    seconds: float = 30.0
    per_s: float = 25.0
    lines: int = 20_000
    flags: Flags = ()
    output_dir: Path = RESULTS


@frozen
class Round:
    """Requests without a batch and beside one, with the share of the cores that they left, and the batch's rows/s."""

    quiet: OpenLoopResult
    beside: OpenLoopResult
    left: float
    rows_per_s_alone: float
    rows_per_s_beside: float

    @property
    def p99_ratio(self) -> float:
        """p99 of the requests beside a batch by that without."""
        return self.beside.latency_ms(0.99, "200") / self.quiet.latency_ms(0.99, "200")

    @property
    def share_of_rest(self) -> float:
        """Rows per second of the batch, by those for which the requests left time."""
        return self.rows_per_s_beside / (self.left * self.rows_per_s_alone)


@define(eq=False)
class BatchClient:
    """Creates batches of one file, as OpenAI's client would."""

    server: Server
    client: httpx.AsyncClient
    file_id: str = field(default="", init=False)

    async def upload(self, texts: Sequence[str]) -> None:
        """Upload a file with a line for each text. Cancellation: at once."""
        lines = [
            {
                "custom_id": str(number),
                "method": "POST",
                "url": "/v1/embeddings",
                "body": {"model": MODEL_NAME, "input": text, "encoding_format": "base64"},
            }
            for number, text in enumerate(texts)
        ]
        content = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
        sent = await self.client.post("/v1/files", data={"purpose": "batch"}, files={"file": ("rows.jsonl", content)})
        self.file_id = sent.raise_for_status().json()["id"]

    async def create(self) -> str:
        """Create a batch of the file, and return its id. Cancellation: at once; there may be a batch."""
        body = {"input_file_id": self.file_id, "endpoint": "/v1/embeddings", "completion_window": "24h"}
        created = await self.client.post("/v1/batches", json=body)
        return str(created.raise_for_status().json()["id"])

    @asynccontextmanager
    async def computing(self) -> AsyncIterator[str]:
        """Compute a batch during the block; yield its id once there are rows. Afterwards the batch is cancelled."""
        batch_id = await self.create()
        with trio.fail_after(BEGIN_TIMEOUT_S):
            while not await self.rows(batch_id):  # noqa: ASYNC110  (another process)
                await trio.sleep(0.1)
        yield batch_id
        (await self.client.post(f"/v1/batches/{batch_id}/cancel")).raise_for_status()
        with trio.fail_after(BEGIN_TIMEOUT_S):
            await self._wait_ended(batch_id)

    async def rows(self, batch_id: str) -> int:
        """Return how many rows of a batch are committed. Raises ``RuntimeError`` if it has ended."""
        batch = (await self.client.get(f"/v1/batches/{batch_id}")).raise_for_status().json()
        if batch["status"] not in ("validating", "in_progress") or batch["request_counts"]["failed"]:
            raise RuntimeError(
                f"the batch is {batch['status']}, with {batch['request_counts']}; it may need more lines"
            )
        return int(batch["request_counts"]["completed"])

    async def _wait_ended(self, batch_id: str) -> None:
        while (await self.client.get(f"/v1/batches/{batch_id}")).json()["status"] != "cancelled":  # noqa: ASYNC110
            await trio.sleep(0.05)


def cpu_s(server: Server) -> float:
    """Return the processor time of all of the server's processes so far."""
    total = 0.0
    for pid in process_tree(server.pid):
        with suppress(psutil.Error):
            times = psutil.Process(pid).cpu_times()
            total += times.user + times.system
    return total


async def measure_round(server: Server, batches: BatchClient, job: OpenLoopJob, step: Any) -> Round:
    """Measure one round. Cancellation: at once."""
    step("requests alone")
    await wait_idle(server)
    spent = cpu_s(server)
    quiet = await run_open_loop(job)
    left = 1 - (cpu_s(server) - spent + quiet.cpu_s) / (job.seconds * (os.cpu_count() or 1))
    step("a batch alone")
    async with batches.computing() as batch_id:
        alone = await _rows_per_s(batches, batch_id, job.seconds)
    step("both")
    async with batches.computing() as batch_id, trio.open_nursery() as nursery:
        rates: list[float] = []

        async def watch() -> None:
            rates.append(await _rows_per_s(batches, batch_id, job.seconds))

        nursery.start_soon(watch)
        beside = await run_open_loop(job)
    return Round(quiet, beside, left, alone, rates[0])


async def _rows_per_s(batches: BatchClient, batch_id: str, seconds: float) -> float:
    before, began = await batches.rows(batch_id), time.perf_counter()
    await trio.sleep(seconds)
    return (await batches.rows(batch_id) - before) / (time.perf_counter() - began)


def show(rounds: Sequence[Round], settings: Settings) -> None:
    """Print the table, and plot the latencies."""
    rows = [
        [
            str(number),
            f"{one.quiet.latency_ms(0.5, '200'):.0f}, {one.quiet.latency_ms(0.99, '200'):.0f}",
            f"{one.beside.latency_ms(0.5, '200'):.0f}, {one.beside.latency_ms(0.99, '200'):.0f}",
            f"{one.p99_ratio:.2f}",
            f"{one.rows_per_s_alone:.0f}",
            f"{one.rows_per_s_beside:.0f}",
            f"{one.left:.2f}",
            f"{one.share_of_rest:.2f}",
        ]
        for number, one in enumerate(rounds, 1)
    ]
    middle = median(one.p99_ratio for one in rounds), median(one.share_of_rest for one in rounds)
    rows.append(["median", "", "", f"{middle[0]:.2f}", "", "", "", f"{middle[1]:.2f}"])
    columns = (
        "round",
        "alone: p50, p99 ms",
        "beside a batch: p50, p99 ms",
        "p99 ÷ alone",
        "batch alone, rows/s",
        "beside, rows/s",
        "left",
        "÷ (alone × left)",
    )
    print_table(f"{settings.per_s:g} requests a second of {TOKENS} tokens beside a batch", columns, rows)
    figure, (axis,) = open_figure(1)
    for what, color in (("quiet", "C0"), ("beside", "C1")):
        results = [getattr(one, what) for one in rounds]
        latencies = sorted(1e3 * latency for result in results for latency in result.outcomes["200"])
        shares = [100 * (index + 1) / len(latencies) for index in range(len(latencies))]
        axis.plot(latencies, shares, color=color, label={"quiet": "without", "beside": "beside a batch"}[what])
    axis.set(xlabel="latency, ms", ylabel="% of requests", xscale="log", title="Interactive requests")
    axis.legend(frameon=False)
    write_figure(figure, settings.output_dir, "beside_a_batch")


async def run(settings: Settings) -> None:
    """Measure and report. Cancellation: at once; the server is stopped."""
    report = Report("beside_a_batch", settings)
    made = Texts()
    by_length = [made.make(settings.lines // len(BATCH_TOKENS), tokens) for tokens in BATCH_TOKENS]
    mixed = [text for texts in zip(*by_length, strict=True) for text in texts]
    bodies = [json.dumps({"model": MODEL_NAME, "input": text}) for text in made.make(512, TOKENS)]
    with tempfile.TemporaryDirectory() as folder:
        async with (
            open_ours("--data-dir", folder, *settings.flags) as server,
            httpx.AsyncClient(base_url=server.url, trust_env=False, timeout=BEGIN_TIMEOUT_S) as client,
        ):
            batches = BatchClient(server, client)
            await batches.upload(mixed)
            await run_open_loop(OpenLoopJob(port=server.port, bodies=bodies, clients=4, seconds=2.0))  # warms up
            rounds = []
            with open_steps("beside a batch", 3 * settings.rounds) as step:
                for number in range(settings.rounds):
                    job = OpenLoopJob(
                        port=server.port,
                        bodies=bodies,
                        per_s=settings.per_s,
                        seconds=settings.seconds,
                        poisson=True,
                        seed=number,
                    )
                    rounds.append(await measure_round(server, batches, job, step))
    show(rounds, settings)
    report.write(
        rounds=[
            {
                "p99_ms": [one.quiet.latency_ms(0.99, "200"), one.beside.latency_ms(0.99, "200")],
                "p50_ms": [one.quiet.latency_ms(0.5, "200"), one.beside.latency_ms(0.5, "200")],
                "p99_ratio": one.p99_ratio,
                "rows_per_s": [one.rows_per_s_alone, one.rows_per_s_beside],
                "left": one.left,
                "share_of_rest": one.share_of_rest,
                "failed": [
                    sum(map(len, result.outcomes.values())) - result.count("200") for result in (one.quiet, one.beside)
                ],
            }
            for one in rounds
        ]
    )


main = command_of(run)


if __name__ == "__main__":
    cyclopts.run(main)
