"""Several processes that send requests, so that none of them limits a server.

Each has its share of the clients, and a connection for each; ``python -m benchmarks.gpu.generators`` is such a process.
"""

import time
from collections.abc import Sequence

import attrs
import trio
from attrs import Factory, frozen

from benchmarks.job_process import do_job, run_jobs, text_of
from benchmarks.load import Load, LoadJob, UnexpectedAnswerError
from trio_pool_serve.load.load_run import quantile

SATURATED = 0.9
"""Share of a core's time from which a process may have been what limited the rate: it has one thread."""


class RequestFailedError(Exception):
    """A request was not answered with 200, and nothing that was measured counts; says what was answered."""


@frozen(kw_only=True)
class Generated:
    """What one process has seen. ``began`` and ``ended``: the measured time, seconds since the epoch.

    ``finished`` counts requests by the share of their duration that is within it. ``failure`` says what ended it early.
    """

    finished: float = 0.0
    seconds: float = 0.0
    cpu_s: float = 0.0
    began: float = 0.0
    ended: float = 0.0
    latencies_s: list[float] = Factory(list)
    failure: str = ""


@frozen(kw_only=True)
class GeneratedLoad:
    """What all processes have seen together.

    ``cpu_shares`` are, for each process, its CPU time divided by the time.
    """

    requests: int
    requests_per_s: float
    p50_ms: float
    p99_ms: float
    began: float
    ended: float
    cpu_shares: list[float]

    @property
    def is_saturated(self) -> bool:
        """Whether a faster server might have got more requests from other generators."""
        return max(self.cpu_shares) >= SATURATED

    @classmethod
    def merge(cls, parts: Sequence[Generated]) -> "GeneratedLoad":
        """Add up what the processes have seen. Raises ``RequestFailedError`` with the first failure."""
        for part in parts:
            if part.failure:
                raise RequestFailedError(part.failure)
        latencies = sorted(latency for part in parts for latency in part.latencies_s)
        if not latencies:
            raise RequestFailedError("no request was answered in the measured time")
        return cls(
            requests=len(latencies),
            requests_per_s=sum(part.finished / part.seconds for part in parts),
            p50_ms=1e3 * quantile(latencies, 0.5),
            p99_ms=1e3 * quantile(latencies, 0.99),
            began=min(part.began for part in parts),
            ended=max(part.ended for part in parts),
            cpu_shares=[part.cpu_s / part.seconds for part in parts],
        )


async def generate(job: LoadJob, processes: int, *, within_s: float) -> GeneratedLoad:
    """Run a job, its clients divided among at most ``processes``.

    Raises ``RequestFailedError`` if a request fails, or if the last one is not answered ``within_s`` seconds.
    Cancellation: the processes are terminated.
    """
    parts: list[Generated] = []
    with trio.move_on_after(within_s) as scope:
        parts = await run_jobs("benchmarks.gpu.generators", divided(job, processes), Generated)
    if scope.cancelled_caught:
        raise RequestFailedError(f"requests were not answered within {within_s:g} s")
    return GeneratedLoad.merge(parts)


def divided(job: LoadJob, processes: int) -> list[LoadJob]:
    """Return a job for each process, with its share of the clients; each begins with other bodies."""
    count = min(processes, job.clients)
    starts = [len(job.bodies) * number // count for number in range(count)]
    return [
        attrs.evolve(
            job,
            clients=job.clients // count + (number < job.clients % count),
            bodies=[*job.bodies[start:], *job.bodies[:start]],
        )
        for number, start in enumerate(starts)
    ]


async def send(job: LoadJob) -> Generated:
    """Run a job in this process."""
    load = Load(job)
    failure = ""
    epoch = time.time() - trio.current_time()
    try:
        await load.send()
    except* UnexpectedAnswerError as errors:
        failure = text_of(errors).splitlines()[0]
    return Generated(
        finished=load.sent.finished,
        seconds=job.seconds,
        cpu_s=load.cpu_s,
        began=load.sent.begin + epoch,
        ended=load.sent.end + epoch,
        latencies_s=load.sent.latencies,
        failure=failure,
    )


if __name__ == "__main__":
    do_job(LoadJob, lambda job: trio.run(send, job))
