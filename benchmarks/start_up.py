"""Measures starts on CPU: time and memory, by torch and by OpenVINO, with and without a cached conversion.

Each kind of start is made once per round, in turns. MiniLM's later start also gets mixed requests
(``benchmarks/mixed_requests.py``), in the last round.

    python -m benchmarks.start_up                          # five rounds; one takes less than four minutes
    python -m benchmarks.start_up --base-model FOLDER      # with a trained model of base size: all-mpnet-base-v2
"""

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import attrs
import cyclopts
import trio
from attrs import define, field, frozen
from cyclopts import Parameter

from benchmarks import memory_growth
from benchmarks.aim import COLUMNS, Aim
from benchmarks.bert_shapes import write_bert
from benchmarks.first_answer import SERVE, Start, median_start, open_start
from benchmarks.memory import ProcessMemory, memory_by_holder
from benchmarks.mixed_requests import mixed_request, send_all
from benchmarks.model import MODEL_NAME, Texts
from benchmarks.report import RESULTS, Report, command_of, console, print_table

TORCH, FIRST, LATER, WORKERS = "torch", "first start", "later start", "later start, 4 API workers and 1 engine process"
BASE_FIRST, BASE = "base size, first start", "base size, later start"

FOR_MIXED = ("--max-model-len=512", "--max-queue-s=60")
"""MiniLM's settings for the mixed requests: these have up to 500 tokens, and wait instead of being refused."""

AFTER = "after the mixed requests"

PAUSE_S = 20
"""Longer than it takes until memory is returned."""

MIB = 2**20


LIVE = Aim(row=f"{LATER}: /livez, s", at_most=1.0, aim=0.6)
READY = Aim(row=f"{LATER}: /readyz, s", at_most=3.0, aim=2.0)
MEMORY = Aim(row=f"{LATER}: memory when ready, MiB", at_most=350, aim=300)
GROWTH = Aim(row=f"{LATER}: memory after the mixed requests ÷ when ready", at_most=1.15)
OF_WORKERS = Aim(row=f"{WORKERS}: memory when ready, MiB", at_most=750, aim=600)


@Parameter(name="*")
@frozen(kw_only=True)
class Settings:
    """The settings. ``base_model``: a folder; BERT-base with random weights by default."""

    rounds: int = 5
    mixed_requests: int = 4500
    base_model: Path | None = None
    output_dir: Path = RESULTS


@define
class Measured:
    """The starts of one kind: their times, and the memory (PSS) of all processes when ready, MiB."""

    starts: list[Start] = field(factory=list)
    pss_mib: list[float] = field(factory=list)
    processes: list[ProcessMemory] = field(factory=list)
    """Processes of the last start."""
    holders: dict[str, dict[str, float]] = field(factory=dict)
    """MiB (PSS) of all processes by what holds them: when ready, after the mixed requests, and after a pause."""

    @property
    def after_requests_mib(self) -> float | None:
        """After the mixed requests."""
        return sum(self.holders[AFTER].values()) if AFTER in self.holders else None

    @property
    def memory_mib(self) -> float:
        """The median of the starts."""
        return median(self.pss_mib)


@contextmanager
def commands(base: Path) -> Iterator[dict[str, list[str]]]:
    """Give the commands of one round, in their order; the cache is empty before the first."""
    with tempfile.TemporaryDirectory() as cache:
        cached = ["--cache-dir", cache]
        minilm = [*SERVE, *FOR_MIXED, *cached]
        of_base = [*SERVE[: SERVE.index("serve") + 1], str(base), "--served-model-name", MODEL_NAME, *cached]
        yield {
            TORCH: [*SERVE, *FOR_MIXED, "--backend", "torch"],
            FIRST: minilm,
            LATER: minilm,
            WORKERS: [*minilm, "--api-workers", "4", "--replicas", "1"],
            BASE_FIRST: of_base,
            BASE: of_base,
        }


async def measure(name: str, command: Sequence[str], measured: Measured, mixed_requests: int) -> None:
    """Start and stop a server once. Cancellation: at once; the server is stopped."""
    async with open_start(command, checks=name not in (BASE_FIRST, BASE)) as (server, start, processes):
        measured.starts.append(start)
        measured.processes = processes
        measured.pss_mib.append(sum(process.pss_mib for process in processes))
        if mixed_requests:
            measured.holders["when ready"] = memory_by_holder(server.pid)
            words, settings = Texts().words, memory_growth.Settings()
            requests = (mixed_request(words, n, settings.max_request_tokens) for n in range(mixed_requests))
            await send_all(server.url, requests, settings.clients)
            measured.holders[AFTER] = memory_by_holder(server.pid)
            await trio.sleep(PAUSE_S)
            measured.holders[f"{PAUSE_S} s later"] = memory_by_holder(server.pid)


def aims(measured: Mapping[str, Measured]) -> list[tuple[Aim, float]]:
    """Return the aims with their values."""
    later, start = measured[LATER], median_start(measured[LATER].starts)
    return [
        (LIVE, start.livez_s),
        (READY, start.readyz_s),
        (MEMORY, later.memory_mib),
        *([] if later.after_requests_mib is None else [(GROWTH, later.after_requests_mib / later.pss_mib[-1])]),
        (OF_WORKERS, measured[WORKERS].memory_mib),
    ]


def show(measured: Mapping[str, Measured], weights_mib: float) -> None:
    """Print the tables."""
    rows = []
    for name, of in measured.items():
        times = [f"{seconds:.2f}" for seconds in attrs.astuple(median_start(of.starts))]
        after = "" if of.after_requests_mib is None else f"{of.after_requests_mib:.0f}"
        beyond = f"{of.memory_mib - weights_mib:.0f}" if name in (BASE_FIRST, BASE) else ""
        rows.append([name, *times, f"{ratio_to_torch(measured, name):.2f}", f"{of.memory_mib:.0f}", after, beyond])
    columns = ["", "/livez", "/readyz", "first answer", "/readyz ÷ torch's"]
    memory = ["MiB when ready", "after the mixed requests", "beyond the file of weights"]
    print_table("seconds from the command, and memory (PSS) of all processes", [*columns, *memory], rows)
    found = measured[LATER].holders
    lines = [[holder, *(f"{of.get(holder, 0):.0f}" for of in found.values())] for holder in found.get(AFTER, ())]
    totals = ["all", *(f"{sum(of.values()):.0f}" for of in found.values())]
    print_table(f"{LATER}: memory (PSS) by what holds it, MiB", ["", *found], [*lines, totals])
    print_table("later starts", ["", *COLUMNS], [aim.cells(value) for aim, value in aims(measured)])


def ratio_to_torch(measured: Mapping[str, Measured], name: str) -> float:
    """Return the median of the rounds' ratios of the time to /readyz: of MiniLM's start by torch."""
    pairs = zip(measured[name].starts, measured[TORCH].starts, strict=True)
    return median(own.readyz_s / torch.readyz_s for own, torch in pairs)


def _write(report: Report, measured: Mapping[str, Measured]) -> None:
    of_each = {
        name: {
            "median": attrs.asdict(median_start(of.starts)),
            "readyz_by_torchs": round(ratio_to_torch(measured, name), 3),
            "memory_mib": of.memory_mib,
            **attrs.asdict(of),
        }
        for name, of in measured.items()
    }
    reached = [{**attrs.asdict(aim), "value": value} for aim, value in aims(measured)]
    base = report.settings.base_model
    report.write({"base_model": base and base.name}, model=MODEL_NAME, aims=reached, starts=of_each)


async def run(settings: Settings) -> None:
    """Measure and report. Cancellation: at once; servers are stopped."""
    report = Report("start_up", settings)
    with tempfile.TemporaryDirectory() as folder:
        base = settings.base_model or write_bert(Path(folder), "base")
        weights_mib = sum(file.stat().st_size for file in base.glob("*.safetensors")) / MIB
        measured: dict[str, Measured] = {}
        with commands(base) as of_round:  # not counted: this warms the file cache
            await measure(TORCH, of_round[TORCH], Measured(), 0)
        for number in range(settings.rounds):
            is_last = number == settings.rounds - 1
            with commands(base) as of_round:
                for name, command in of_round.items():
                    of = measured.setdefault(name, Measured())
                    await measure(name, command, of, settings.mixed_requests if is_last and name == LATER else 0)
                    ready_s, memory = of.starts[-1].readyz_s, of.pss_mib[-1]
                    console.print(f"round {number + 1}: {name}: ready in {ready_s:.2f} s, {memory:.0f} MiB")
            if not is_last:
                _write(report, measured)
    show(measured, weights_mib)
    _write(report, measured)


main = command_of(run)


if __name__ == "__main__":
    cyclopts.run(main)
