"""Clients in a separate process: ``run_load`` starts it, and it runs ``python -m benchmarks.load``.

The job comes in on standard input and the result goes out on standard output, as JSON.
"""

import gc
import itertools
import math
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import trio
from attrs import Factory, define, field, frozen

from benchmarks.connection import Connection, request_bytes
from benchmarks.thread_clocks import clocks_since, read_clocks

ROOT = Path(__file__).parent.parent


@frozen(kw_only=True)
class LoadJob:
    """The requests of some clients, and how often they are sent.

    Each of ``clients`` sends its next request when it has its answer (closed loop). With ``every_s`` each
    has a timetable instead, the clients' shifted evenly against one another (open loop). Latencies then
    count from when a request was scheduled, so that a long stall is as many slow requests as it would have met.
    """

    port: int
    host: str = "127.0.0.1"
    path: str = "/v1/embeddings"
    bodies: list[str] = Factory(list)
    clients: int = 1
    seconds: float = 8.0
    ramp_s: float = 0.5
    every_s: float | None = None
    server_pid: int = 0
    """The server's first process, if it runs on this machine and its CPU time is to be measured."""


def health_probe(port: int, seconds: float) -> LoadJob:
    """Return a job that requests ``/health`` every 10 ms, whether or not earlier answers have arrived.

    One connection answers one request at a time, so there are many: a stall delays the requests sent
    during it, and not also later ones.
    """
    return LoadJob(port=port, path="/health", clients=64, every_s=0.64, seconds=seconds)


@frozen(kw_only=True)
class LoadResult:
    """What the clients saw, and the CPU time per request that the generator itself and the server's processes spent."""

    requests: int
    requests_per_s: float
    mean_ms: float
    p50_ms: float
    p95_ms: float
    p99_ms: float
    max_ms: float
    client_cpu_ms: float
    server_cpu_ms: float | None = None


@define
class Load:
    """One job being run.

    A request counts for the latencies if it begins before the end and ends after the ramp, however long it
    takes; for the throughput with the share of its time that lies between the two, so that a few long requests
    count as rightly as many short ones.
    """

    job: LoadJob
    begin: float = field(init=False)
    end: float = field(init=False)
    latencies: list[float] = field(init=False, factory=list)
    finished: float = field(init=False, default=0.0)
    cpu_s: float = field(init=False, default=0.0)
    server_cpu_s: float | None = field(init=False, default=None)

    async def run(self) -> LoadResult:
        """Run the job. Raises ``UnexpectedAnswerError``, in a group, with the first failure: there must be none."""
        await self.send()
        return self._result()

    async def send(self) -> None:
        """Send the requests, until the end and the last answer. Raises as ``run``."""
        requests = [request_bytes(self.job.path, body.encode()) for body in self.job.bodies]
        turns = itertools.cycle(requests or [request_bytes(self.job.path)])
        gc.freeze()
        self.begin = trio.current_time() + self.job.ramp_s
        self.end = self.begin + self.job.seconds
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._watch_cpu)
            for number in range(self.job.clients):
                nursery.start_soon(self._client, turns, (self.job.every_s or 0.0) * number / self.job.clients)

    async def _watch_cpu(self) -> None:
        await trio.sleep_until(self.begin)
        spent = time.process_time()
        server = read_clocks(self.job.server_pid) if self.job.server_pid else {}
        await trio.sleep_until(self.end)
        if server:
            spent_by_server = clocks_since(server, self.job.server_pid).values()
            self.server_cpu_s = sum(clock.cpu_s for clock in spent_by_server)
        self.cpu_s = time.process_time() - spent

    async def _client(self, turns: Iterator[bytes], shift_s: float) -> None:
        async with await Connection.open(self.job.port, self.job.host) as connection:
            scheduled = trio.current_time() + shift_s
            await trio.sleep_until(min(scheduled, self.end))
            while scheduled < self.end:
                await connection.ask(next(turns))
                now = trio.current_time()
                self._count(scheduled, now)
                if self.job.every_s is None:
                    scheduled = now
                else:
                    scheduled += self.job.every_s
                    await trio.sleep_until(min(scheduled, self.end))

    def _count(self, scheduled: float, now: float) -> None:
        if now >= self.begin:
            self.latencies.append(now - scheduled)
        between = min(now, self.end) - max(scheduled, self.begin)
        if between > 0:
            self.finished += between / (now - scheduled)

    def _result(self) -> LoadResult:
        self.latencies.sort()
        return LoadResult(
            requests=len(self.latencies),
            requests_per_s=self.finished / self.job.seconds,
            mean_ms=1e3 * sum(self.latencies) / len(self.latencies),
            p50_ms=self._latency_ms(0.5),
            p95_ms=self._latency_ms(0.95),
            p99_ms=self._latency_ms(0.99),
            max_ms=self._latency_ms(1.0),
            client_cpu_ms=1e3 * self.cpu_s / max(1, self.finished),
            server_cpu_ms=None if self.server_cpu_s is None else 1e3 * self.server_cpu_s / max(1, self.finished),
        )

    def _latency_ms(self, share: float) -> float:
        """Return the smallest latency that ``share`` of the requests stayed within."""
        return 1e3 * self.latencies[max(0, math.ceil(share * len(self.latencies)) - 1)]


async def run_load(job: LoadJob) -> LoadResult:
    """Run a job in a new process. Raises ``CalledProcessError`` if a request fails.

    Cancellation: the process is terminated.
    """
    command = [sys.executable, "-m", "benchmarks.load"]
    done = await trio.run_process(command, stdin=msgspec.json.encode(job), capture_stdout=True, cwd=ROOT)
    return msgspec.json.decode(done.stdout, type=LoadResult)


async def run_loads(*jobs: LoadJob) -> list[LoadResult]:
    """Run jobs side by side, each in its own process; return their results in order."""
    results: dict[int, LoadResult] = {}

    async def run(number: int, job: LoadJob) -> None:
        results[number] = await run_load(job)

    async with trio.open_nursery() as nursery:
        for number, job in enumerate(jobs):
            nursery.start_soon(run, number, job)
    return [results[number] for number in range(len(jobs))]


async def run_load_and_probe(job: LoadJob, probe: LoadJob) -> tuple[LoadResult, LoadResult]:
    """Run two jobs side by side, each in its own process."""
    load, health = await run_loads(job, probe)
    return load, health


if __name__ == "__main__":
    job = msgspec.json.decode(sys.stdin.buffer.read(), type=LoadJob)
    sys.stdout.buffer.write(msgspec.json.encode(trio.run(Load(job).run)))
