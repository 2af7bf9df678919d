"""What does it cost other models when one is loaded and unloaded while the server runs? Their p99, and the memory.

The packaged model answers requests on a timetable while a copy of it is loaded by ``POST /v1/models`` and unloaded by
``DELETE``, again and again. Each round is of a time without changes and one with them, so that both meet the same
machine. Before the first round the copy is loaded twice: it is converted for OpenVINO, and libraries are imported.

    python -m benchmarks.models_at_run_time
"""

import json
import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import attrs
import cyclopts
import httpx
import numpy as np
import trio
from attrs import define, field, frozen
from cyclopts import Parameter

from benchmarks.load import LoadJob, LoadResult, run_load
from benchmarks.memory import memory_of
from benchmarks.model import MODEL_NAME, MODEL_PATH, Texts
from benchmarks.report import RESULTS, Flags, Report, command_of, open_figure, open_progress, print_table, write_figure
from benchmarks.servers import Server, open_ours

TOKENS = 34

NAME = "another"

KEY = "benchmark"

MOST_P99 = 1.5
"""Times the p99 of the same model without changes."""

MOST_GROWTH = 0.05
"""Share of the memory after the first unload that there may be more after the last."""


@Parameter(name="*")
@frozen(kw_only=True)
class Settings:
    """The settings: rounds until the model was loaded ``changes`` times; ``seconds`` without changes and with them.

    The other model gets ``per_s`` requests a second. ``pause_s``: between two changes.
    """

    rounds: int = 1
    changes: int = 100
    seconds: float = 15.0
    per_s: float = 5.0
    pause_s: float = 0.2
    flags: Flags = (
        "--max-queue-s",
        "60",
    )
    output_dir: Path = RESULTS


@frozen
class Change:
    """One load and unload: how long both took, and the memory in MiB that the server says the model took."""

    load_s: float
    unload_s: float
    memory_mib: float
    resident_mib: float
    """Memory of the server after the model was unloaded."""


@define
class Rounds:
    """What was measured, in order."""

    quiet: list[LoadResult] = field(factory=list)
    changing: list[LoadResult] = field(factory=list)
    first: Change | None = None
    """With the conversion."""
    changes: list[Change] = field(factory=list)

    @property
    def p99_ratio(self) -> float:
        """The median over the rounds of p99 with changes divided by p99 without."""
        return float(
            np.median(
                [changing.p99_ms / quiet.p99_ms for quiet, changing in zip(self.quiet, self.changing, strict=True)]
            )
        )

    @property
    def growth(self) -> float:
        """The share by which there was more memory after the last tenth of the unloads than after the first tenth."""
        resident = [change.resident_mib for change in self.changes]
        tenth = max(1, len(resident) // 10)
        return float(np.median(resident[-tenth:]) / np.median(resident[:tenth]) - 1)


async def change(client: httpx.AsyncClient, server: Server, folder: Path, pause_s: float) -> Change:
    """Load the model and unload it. Cancellation: at once; it may be loaded then."""
    began = time.perf_counter()
    answer = await client.post("/v1/models", json={"model": str(folder), "name": NAME})
    memory = answer.raise_for_status().json().get("memory_bytes", 0)
    loaded = time.perf_counter()
    await trio.sleep(pause_s)
    left = time.perf_counter()
    (await client.delete(f"/v1/models/{NAME}")).raise_for_status()
    unloaded = time.perf_counter()
    resident = sum(process.rss_mib for process in memory_of(server.pid) if process.pid == server.pid)
    return Change(loaded - began, unloaded - left, memory / 2**20, resident)


async def measure(server: Server, folder: Path, settings: Settings) -> Rounds:
    """Run the rounds. Raises ``UnexpectedAnswerError`` if any request fails. Cancellation: at once."""
    measured = Rounds()
    texts = Texts().make(64, TOKENS)
    job = LoadJob(
        port=server.port,
        path="/embed",  # which needs no key here
        bodies=[json.dumps({"model": MODEL_NAME, "inputs": text}) for text in texts],
        per_s=settings.per_s,
        seconds=settings.seconds,
    )
    headers = {"authorization": f"Bearer {KEY}"}
    async with httpx.AsyncClient(base_url=server.url, headers=headers, trust_env=False, timeout=600) as client:
        measured.first = await change(client, server, folder, settings.pause_s)
        await change(client, server, folder, settings.pause_s)
        with open_progress() as progress:
            task = progress.add_task("loads", total=settings.changes)
            while len(measured.changes) < settings.changes:
                measured.quiet.append(await run_load(job))
                async with trio.open_nursery() as nursery:
                    has_ended = trio.Event()

                    async def load() -> None:
                        measured.changing.append(await run_load(job))
                        has_ended.set()  # noqa: B023  (that of this round)

                    nursery.start_soon(load)
                    while not has_ended.is_set():
                        measured.changes.append(await change(client, server, folder, settings.pause_s))
                        progress.update(task, completed=len(measured.changes))
                        await trio.sleep(settings.pause_s)
    return measured


def show(measured: Rounds) -> None:
    """Print the tables."""

    def median(values: Sequence[float], digits: int = 1) -> str:
        return f"{np.median(values):.{digits}f}"

    rows = [
        [what, *(median([getattr(load, name) for load in loads]) for name in ("p50_ms", "p95_ms", "p99_ms", "max_ms"))]
        for what, loads in (("without changes", measured.quiet), ("with changes", measured.changing))
    ]
    print_table("Requests for the other model, medians of rounds", ["", "p50 ms", "p95 ms", "p99 ms", "most ms"], rows)
    changes, first = measured.changes, measured.first
    assert first is not None
    rows = [
        ["rounds", str(len(measured.quiet))],
        ["loads and unloads", str(len(changes))],
        ["requests that failed", "0"],
        [f"p99 with changes ÷ without (at most {MOST_P99})", f"{measured.p99_ratio:.2f}"],
        ["first load, with the conversion, s", f"{first.load_s:.1f}"],
        ["load, s", median([change.load_s for change in changes], 2)],
        ["unload, s", median([change.unload_s for change in changes], 2)],
        ["memory of the model, MiB", median([change.memory_mib for change in changes], 0)],
        [
            "resident after the first tenth of the unloads, MiB",
            f"{_resident(changes[: max(1, len(changes) // 10)]):.0f}",
        ],
        ["resident after the last tenth, MiB", f"{_resident(changes[-max(1, len(changes) // 10) :]):.0f}"],
        [f"growth (at most {MOST_GROWTH:.0%})", f"{measured.growth:+.1%}"],
    ]
    print_table("Loads and unloads", ["what", "was"], rows)


def _resident(changes: Sequence[Change]) -> float:
    return float(np.median([change.resident_mib for change in changes]))


def draw(measured: Rounds, settings: Settings) -> None:
    """Plot p99 by round, and the memory after each unload."""
    figure, (latency, memory) = open_figure(2)
    for what, loads in (("without changes", measured.quiet), ("with changes", measured.changing)):
        latency.plot([load.p99_ms for load in loads], marker="o", label=what)
    latency.set(title="p99 of the other model, ms", xlabel="round", ylim=(0, None))
    latency.legend(frameon=False)
    memory.plot([change.resident_mib for change in measured.changes])
    memory.set(title="Resident once unloaded, MiB", xlabel="load", ylim=(0, None))
    write_figure(figure, settings.output_dir, "models_at_run_time")


async def run(settings: Settings) -> None:
    """Measure and report. Cancellation: at once; the server is stopped."""
    report = Report("models_at_run_time", settings)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / NAME
        shutil.copytree(MODEL_PATH, folder)
        flags = ["--model-api", "--api-key", KEY, "--api-key-scope", "vllm", "--cache-dir", f"{temporary}/cache"]
        async with open_ours(*flags, *settings.flags) as server:
            measured = await measure(server, folder, settings)
    show(measured)
    document = {"p99_ratio": measured.p99_ratio, "growth": measured.growth, **attrs.asdict(measured)}
    report.write(**document)
    draw(measured, settings)


main = command_of(run)


if __name__ == "__main__":
    cyclopts.run(main)
