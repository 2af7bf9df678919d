"""Jobs in processes of their own: a job is JSON on standard input, its result JSON on standard output."""

import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec
import trio

from benchmarks.servers import ROOT

Result = TypeVar("Result")


async def run_job(module: str, job: object, result: type[Result]) -> Result:
    """Run ``python -m MODULE`` for a job. Raises ``CalledProcessError`` if it fails.

    Cancellation: the process is terminated.
    """
    command = [sys.executable, "-m", module]
    done = await trio.run_process(command, stdin=msgspec.json.encode(job), capture_stdout=True, cwd=ROOT)
    return msgspec.json.decode(done.stdout, type=result)


async def run_jobs(module: str, jobs: Sequence[object], result: type[Result]) -> list[Result]:
    """Run jobs side by side, each in a process; return their results in order. Raises as ``run_job``, in a group."""
    results: dict[int, Result] = {}

    async def run(number: int, job: object) -> None:
        results[number] = await run_job(module, job, result)

    async with trio.open_nursery() as nursery:
        for number, job in enumerate(jobs):
            nursery.start_soon(run, number, job)
    return [results[number] for number in range(len(jobs))]


def do_job(kind: type[Any], do: Callable[[Any], object]) -> None:
    """Do the job of this process."""
    job = msgspec.json.decode(sys.stdin.buffer.read(), type=kind)
    sys.stdout.buffer.write(msgspec.json.encode(do(job)))


def text_of(error: BaseException) -> str:
    """Return what an error says; of a group, what its first error says."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}".removesuffix(": ")
