"""How long from the command to the first answer.

python -m benchmarks.first_answer                          # trio-pool-serve serve, files cached
python -m benchmarks.first_answer --script scripts/serve   # the script, in this checkout
python -m benchmarks.first_answer --fresh-clone            # git clone, then the script, twice
"""

import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import median
from typing import Annotated

import attrs
import cyclopts
import httpx
import numpy as np
import trio
from attrs import frozen
from cyclopts import Parameter

from benchmarks.memory import ProcessMemory, memory_of
from benchmarks.model import MODEL_NAME, MODEL_PATH, check_vectors, oracle_vectors
from benchmarks.report import RESULTS, Report, command_of, console, open_figure, print_table
from benchmarks.servers import ROOT, Server, free_port, open_process, wait_for_ok

TEXT = "A server is worth nothing before its first answer."

POLL_EVERY_S = 0.005

SERVE = [sys.executable, "-m", "trio_pool_serve", "serve", MODEL_PATH, "--served-model-name", MODEL_NAME]


@Parameter(name="*")
@frozen(kw_only=True)
class Settings:
    """The settings. ``fresh_clone`` is one first and one second run, regardless of ``rounds``."""

    rounds: int = 3
    script: Path | None = None
    fresh_clone: Annotated[bool, Parameter(negative=())] = False
    output_dir: Path = RESULTS


@frozen
class Start:
    """Seconds since the command was given."""

    livez_s: float
    readyz_s: float
    first_answer_s: float


@asynccontextmanager
async def open_start(
    command: Sequence[str], *, cwd: Path = ROOT, checks: bool = True
) -> AsyncIterator[tuple[Server, Start, list[ProcessMemory]]]:
    """Start a server and wait for its first answer; give it with its times, and the memory it had when ready.

    ``checks``: the answer must be MiniLM's. Leaving the block stops the server.
    """
    port = free_port()
    began = trio.current_time()
    async with open_process("server", [*command, "--port", str(port)], port, cwd=cwd) as server:
        await wait_for_ok(f"{server.url}/livez", every_s=POLL_EVERY_S)
        live = trio.current_time()
        await wait_for_ok(f"{server.url}/readyz", every_s=POLL_EVERY_S)
        ready = trio.current_time()
        memory = memory_of(server.pid)
        asked = trio.current_time()
        async with httpx.AsyncClient(trust_env=False, timeout=60) as client:
            answer = await client.post(f"{server.url}/v1/embeddings", json={"input": TEXT})
        answered = trio.current_time()
        if checks:
            _check(answer)
        answer.raise_for_status()
        yield server, Start(live - began, ready - began, answered - asked + ready - began), memory


async def time_start(command: Sequence[str], *, cwd: Path = ROOT) -> Start:
    """Start a server, wait for its first answer, check it, and stop the server."""
    async with open_start(command, cwd=cwd) as (_, start, _):
        return start


def _check(answer: httpx.Response) -> None:
    vector = answer.raise_for_status().json()["data"][0]["embedding"]
    check_vectors(np.array([vector], dtype=np.float32), oracle_vectors([TEXT]))


async def time_fresh_clone(script: Path) -> dict[str, list[Start]]:
    """Return the first and the second run of ``script`` in a new clone of the last commit."""
    with tempfile.TemporaryDirectory() as folder:
        clone = Path(folder) / "clone"
        await trio.run_process(["git", "clone", "--quiet", str(ROOT), str(clone)])
        command = [str(clone / script)]
        console.print("the first run installs everything; this takes minutes")
        first = await time_start(command, cwd=clone)
        second = await time_start(command, cwd=clone)
    return {"fresh clone, first run": [first], "fresh clone, second run": [second]}


async def time_warm(settings: Settings) -> dict[str, list[Start]]:
    """Return starts with a warm file cache: one more than the rounds is made, and not counted."""
    name = str(settings.script or "trio-pool-serve serve")
    command = [str(ROOT / settings.script)] if settings.script else SERVE
    await time_start(command)
    starts = []
    for number in range(settings.rounds):
        console.print(f"{name}: start {number + 1} of {settings.rounds}")
        starts.append(await time_start(command))
    return {name: starts}


def median_start(starts: list[Start]) -> Start:
    """Return the medians."""
    return Start(*(median(times) for times in zip(*map(attrs.astuple, starts), strict=True)))


def draw(measured: dict[str, list[Start]], report: Report) -> None:
    """Plot the stages of each kind of start after one another."""
    figure, (axis,) = open_figure(1)
    for row, (kind, starts) in enumerate(measured.items()):
        start = median_start(starts)
        ends = attrs.astuple(start)
        stages = zip(("to /livez", "to /readyz", "to the first answer"), (0.0, *ends), ends, strict=False)
        for colour, (label, left, right) in enumerate(stages):
            axis.barh(kind, right - left, left=left, color=f"C{colour}", label="" if row else label)
    axis.set(title="From the command to the first answer", xlabel="seconds")
    axis.legend(frameon=False)
    report.write_figure(figure)


async def run(settings: Settings) -> None:
    """Measure and report."""
    report = Report("fresh_clone" if settings.fresh_clone else "first_answer", settings)
    if settings.fresh_clone:
        measured = await time_fresh_clone(settings.script or Path("scripts/serve"))
    else:
        measured = await time_warm(settings)
    rows = [[kind, *(f"{s:.2f}" for s in attrs.astuple(median_start(starts)))] for kind, starts in measured.items()]
    print_table("seconds from the command", ["", "/livez", "/readyz", "first answer"], rows)
    starts = {
        kind: {"median": attrs.asdict(median_start(starts)), "rounds": [attrs.asdict(start) for start in starts]}
        for kind, starts in measured.items()
    }
    report.write(model=MODEL_NAME, starts=starts)
    draw(measured, report)


main = command_of(run)


if __name__ == "__main__":
    cyclopts.run(main)
