"""Does a server's memory grow with the requests that it has served? And the cost of keeping it from growing.

Each server gets the same mixed requests (``benchmarks/mixed_requests.py``) from several clients. Its memory, that of
all its processes, is read between them and once more after a pause; processor time and page faults are those of all
requests. Other settings to compare with are environment
variables and flags:

    python -m benchmarks.memory_growth
    python -m benchmarks.memory_growth --compare "MALLOC_ARENA_MAX=2" "--engine local"
"""

import itertools
import re
import shlex
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import attrs
import cyclopts
import psutil
import trio
from attrs import define, field, frozen
from cyclopts import Parameter

from benchmarks.bert_shapes import Shape, write_bert
from benchmarks.memory import memory_of
from benchmarks.mixed_requests import mixed_request, send_all
from benchmarks.model import MODEL_NAME, MODEL_PATH, Texts
from benchmarks.report import RESULTS, Flags, Report, command_of, open_figure, open_steps, print_table, write_figure
from benchmarks.servers import READY_TIMEOUT_S, Server, free_port, open_process, wait_for_ok
from benchmarks.thread_clocks import process_tree

AS_IT_COMES = "as it comes"

WARM = 1000
"""Requests after which memory is no longer expected to grow."""

ASSIGNMENT = re.compile(r"[A-Z][A-Z0-9_]*=")


@Parameter(name="*")
@frozen(kw_only=True)
class Settings:
    """The settings: ``requests`` of closed-loop ``clients``, with memory read after every ``every``.

    A request of several texts has at most about ``max_request_tokens``. Each string in ``compare`` is another server to
    be put through the same: environment variables, then flags. In each round every server is started once.
    """

    rounds: int = 1
    requests: int = 4500
    every: int = 500
    clients: int = 8
    max_request_tokens: int = 2048
    idle_s: float = 30.0
    model: Literal["minilm"] | Shape = "minilm"
    compare: Flags = ()
    output_dir: Path = RESULTS


@frozen
class Sample:
    """The memory of all processes of a server once it has answered ``requests``.

    ``anonymous_mib`` is without files, of which other programs that map them take a share.
    """

    requests: int
    pss_mib: float
    anonymous_mib: float
    largest_process_mib: float


@frozen
class Spent:
    """What all processes of a server have spent since their start."""

    processor_s: float
    minor_faults: int


@define
class Growth:
    """One server: its memory, and its costs per request."""

    samples: list[Sample] = field(factory=list)
    idle: Sample | None = None
    processor_ms: float = 0.0
    minor_faults: float = 0.0

    @property
    def warm(self) -> Sample:
        """The memory after ``WARM`` requests."""
        return next((sample for sample in self.samples if sample.requests >= WARM), self.samples[-1])

    @property
    def ratio(self) -> float:
        """Memory at the end over that of the warm server."""
        return self.samples[-1].pss_mib / self.warm.pss_mib

    @property
    def anonymous_ratio(self) -> float:
        """The same without files."""
        return self.samples[-1].anonymous_mib / self.warm.anonymous_mib


def sample_memory(server: Server, requests: int) -> Sample:
    """Return the server's memory now."""
    processes = memory_of(server.pid)
    sizes = [process.pss_mib for process in processes]
    return Sample(requests, sum(sizes), sum(process.anonymous_mib for process in processes), max(sizes))


def spent_by(server: Server) -> Spent:
    """Return what the server's processes have spent."""
    processor_s, faults = 0.0, 0
    for pid in process_tree(server.pid):
        with suppress(psutil.NoSuchProcess, FileNotFoundError, ProcessLookupError):
            times = psutil.Process(pid).cpu_times()
            processor_s += times.user + times.system
            # After the command's name, which may have spaces: proc_pid_stat(5), field 10.
            faults += int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[7])
    return Spent(processor_s, faults)


async def measure(server: Server, settings: Settings, words: list[str]) -> Growth:
    """Send all requests and return what they did to the server. Cancellation: at once."""
    growth = Growth([sample_memory(server, 0)])
    before = spent_by(server)
    with open_steps(server.name, -(-settings.requests // settings.every)) as step:
        for first in range(0, settings.requests, settings.every):
            last = min(first + settings.every, settings.requests)
            step(f"{growth.samples[-1].pss_mib:.0f} MiB")
            requests = (mixed_request(words, number, settings.max_request_tokens) for number in range(first, last))
            await send_all(server.url, requests, settings.clients)
            growth.samples.append(sample_memory(server, last))
    after = spent_by(server)
    growth.processor_ms = 1e3 * (after.processor_s - before.processor_s) / settings.requests
    growth.minor_faults = (after.minor_faults - before.minor_faults) / settings.requests
    await trio.sleep(settings.idle_s)
    growth.idle = sample_memory(server, settings.requests)
    return growth


async def measure_variant(variant: str, model: Path, settings: Settings, words: list[str]) -> Growth:
    """Start a server and measure it. Cancellation: at once; the server is stopped."""
    name, words_of = variant or AS_IT_COMES, shlex.split(variant)
    assignments = list(itertools.takewhile(ASSIGNMENT.match, words_of))
    port = free_port()
    command = [
        *("env", *assignments, sys.executable, "-m", "trio_pool_serve", "serve", f"{MODEL_NAME}={model}"),
        *("--max-model-len=512", "--max-queue-s=60", *words_of[len(assignments) :], "--port", str(port)),
    ]
    async with open_process(name, command, port) as server:
        with trio.fail_after(READY_TIMEOUT_S):
            await wait_for_ok(f"{server.url}/readyz")
        return await measure(server, settings, words)


def show(measured: dict[str, Growth], settings: Settings) -> None:
    """Print the table."""
    columns = [
        *("server", "MiB before", f"after {WARM}", f"after {settings.requests}", "ratio", "without files"),
        *(f"after {settings.idle_s:g} s idle", "processor ms/request", "minor faults/request"),
    ]
    rows = [
        [
            name,
            f"{growth.samples[0].pss_mib:.0f}",
            f"{growth.warm.pss_mib:.0f}",
            f"{growth.samples[-1].pss_mib:.0f}",
            f"{growth.ratio:.3f}",
            f"{growth.anonymous_ratio:.3f}",
            f"{growth.idle.pss_mib:.0f}" if growth.idle else "",
            f"{growth.processor_ms:.1f}",
            f"{growth.minor_faults:.0f}",
        ]
        for name, growth in measured.items()
    ]
    print_table("Memory of all processes, MiB", columns, rows)


def draw(measured: dict[str, Growth], settings: Settings) -> None:
    """Plot memory by requests."""
    figure, (axis,) = open_figure(1)
    for name, growth in measured.items():
        requests = [sample.requests for sample in growth.samples]
        axis.plot(requests, [sample.pss_mib for sample in growth.samples], marker="o", label=name)
    axis.set(title="Memory of all processes, MiB", xlabel="mixed requests", ylim=(0, None))
    axis.legend(frameon=False)
    write_figure(figure, settings.output_dir, "memory_growth")


async def run(settings: Settings) -> None:
    """Measure and report. Cancellation: at once; servers are stopped."""
    report = Report("memory_growth", settings)
    words = Texts().words
    measured: dict[str, Growth] = {}
    with tempfile.TemporaryDirectory() as folder:
        model = Path(MODEL_PATH) if settings.model == "minilm" else write_bert(Path(folder), settings.model)
        for number, variant in itertools.product(range(settings.rounds), ("", *settings.compare)):
            name = (variant or AS_IT_COMES) + (f", round {number + 1}" if number else "")
            measured[name] = await measure_variant(variant, model, settings, words)
    show(measured, settings)
    servers: list[dict[str, Any]] = [
        {"server": name, "ratio": growth.ratio, **attrs.asdict(growth)} for name, growth in measured.items()
    ]
    report.write(servers=servers)
    draw(measured, settings)


main = command_of(run)


if __name__ == "__main__":
    cyclopts.run(main)
