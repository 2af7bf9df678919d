"""Clients in a separate process, which ``run_load`` starts: the load generator of ``trio_pool_serve.load``.

A request that fails ends the load.
"""

import time
from typing import NoReturn

import trio
from attrs import Factory, define, field, frozen

from benchmarks.job_process import do_job, run_job, run_jobs
from benchmarks.thread_clocks import clocks_since, read_clocks
from trio_pool_serve.load.client_connection import Target, request_bytes
from trio_pool_serve.load.load_run import LoadPlan, LoadRun, quantile

MODULE = "benchmarks.load"


class UnexpectedAnswerError(Exception):
    """An answer that no benchmark may count: not 200, or cut short."""


@frozen(kw_only=True)
class LoadJob:
    """The requests of some clients, and how often they are sent.

    Each of ``clients`` sends its next request when it has its answer (closed loop). With ``per_s`` requests begin on a
    timetable instead (open loop).
    """

    port: int
    host: str = "127.0.0.1"
    path: str = "/v1/embeddings"
    bodies: list[str] = Factory(list)
    clients: int = 1
    seconds: float = 8.0
    ramp_s: float = 0.5
    per_s: float = 0.0
    server_pid: int = 0
    """The server's first process, if it runs on this machine and its CPU time is to be measured."""


def health_probe(port: int, seconds: float) -> LoadJob:
    """Return a job that requests ``/health`` every 10 ms, whether or not earlier answers have arrived."""
    return LoadJob(port=port, path="/health", per_s=100, seconds=seconds)


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


@define(eq=False)
class Load:
    """One job being run."""

    job: LoadJob
    sent: LoadRun = field(init=False)
    cpu_s: float = field(init=False, default=0.0)
    server_cpu_s: float | None = field(init=False, default=None)

    def __attrs_post_init__(self) -> None:
        job = self.job
        plan = LoadPlan(
            target=Target(host=job.host, port=job.port),
            requests=[request_bytes(job.path, body.encode()) for body in job.bodies] or [request_bytes(job.path)],
            clients=0 if job.per_s else job.clients,
            per_s=job.per_s,
            ramp_s=job.ramp_s,
            seconds=job.seconds,
        )
        self.sent = LoadRun(plan, on_failure=_raise)

    async def run(self) -> LoadResult:
        """Run the job. Raises ``UnexpectedAnswerError``, in a group, with the first failure: there must be none."""
        await self.send()
        return self._result()

    async def send(self) -> None:
        """Send the requests, until the end and the last answer. Raises as ``run``."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.sent.run)
            nursery.start_soon(self._watch_cpu)

    async def _watch_cpu(self) -> None:
        await trio.sleep(self.job.ramp_s)
        spent = time.process_time()
        server = read_clocks(self.job.server_pid) if self.job.server_pid else {}
        await trio.sleep(self.job.seconds)
        if server:
            spent_by_server = clocks_since(server, self.job.server_pid).values()
            self.server_cpu_s = sum(clock.cpu_s for clock in spent_by_server)
        self.cpu_s = time.process_time() - spent

    def _result(self) -> LoadResult:
        latencies, finished = sorted(self.sent.latencies), self.sent.finished
        return LoadResult(
            requests=len(latencies),
            requests_per_s=finished / self.job.seconds,
            mean_ms=1e3 * sum(latencies) / len(latencies),
            p50_ms=1e3 * quantile(latencies, 0.5),
            p95_ms=1e3 * quantile(latencies, 0.95),
            p99_ms=1e3 * quantile(latencies, 0.99),
            max_ms=1e3 * latencies[-1],
            client_cpu_ms=1e3 * self.cpu_s / max(1, finished),
            server_cpu_ms=None if self.server_cpu_s is None else 1e3 * self.server_cpu_s / max(1, finished),
        )


def _raise(outcome: str, reason: str) -> NoReturn:
    raise UnexpectedAnswerError(f"{outcome}: {reason}" if reason else outcome)


async def run_load(job: LoadJob) -> LoadResult:
    """Run a job in a new process. Raises ``CalledProcessError`` if a request fails."""
    return await run_job(MODULE, job, LoadResult)


async def run_loads(*jobs: LoadJob) -> list[LoadResult]:
    """Run jobs side by side, each in its own process; return their results in order."""
    return await run_jobs(MODULE, jobs, LoadResult)


if __name__ == "__main__":
    do_job(LoadJob, lambda job: trio.run(Load(job).run))
