"""Where does one request's CPU time go? µs by stage and thread, waiting for the interpreter lock and for a core.

One text of 34 tokens per request. The server runs as usual and is observed from outside.

    python -m benchmarks.request_profile
    python -m benchmarks.request_profile --server-flags "--engine process --api-workers 2"
"""

import os
import shlex
from pathlib import Path
from typing import Annotated, Any

import attrs
import cyclopts
import numpy as np
from attrs import frozen
from cyclopts import Parameter
from matplotlib import colormaps
from matplotlib.axes import Axes

from benchmarks.answers import bodies_of, check_answers
from benchmarks.load import LoadJob, LoadResult, run_load
from benchmarks.model import MODEL_NAME, Texts, oracle_vectors
from benchmarks.report import (
    RESULTS,
    Numbers,
    Report,
    add_markdown,
    command_of,
    console,
    open_figure,
    open_progress,
    write_figure,
)
from benchmarks.servers import Server, open_ours
from benchmarks.stack_samples import ORDER, record_stacks
from benchmarks.thread_clocks import Thread, clocks_since, read_clocks, server_process, thread_name, watch_lock
from benchmarks.thread_profile import Cast, Observed, RequestProfile, ThreadProfile, make_profile

TOKENS = 34

TEXTS = 512

CHECKED_TEXTS = 32

MOST_OTHER = 0.05
"""The share of samples without a stage past which the table of stages is out of date."""


@Parameter(name="*")
@frozen(kw_only=True)
class Settings:
    """The settings: in each round and for each number of clients four loads of ``seconds``."""

    rounds: int = 3
    seconds: float = 10.0
    clients: Numbers = (1, 32)
    server_flags: Annotated[str, Parameter(allow_leading_hyphen=True)] = ""
    """More flags for the server."""
    stacks_per_s: int = 150
    """How often py-spy looks at the server's stacks."""
    stop_server: Annotated[bool, Parameter(negative=())] = False
    """Stop the server for each look: no stack is torn, but every thread is woken each time."""
    looks_per_s: int = 250
    """How often the system call of each thread is read."""
    output_dir: Path = RESULTS


# -- measuring ----------------------------------------------------------------------------------------


@frozen
class Subject:
    """The server, and its requests."""

    server: Server
    pid: int
    bodies: list[str]

    async def load(self, clients: int, seconds: float) -> LoadResult:
        """Load it; every request counts, also those of the first moments."""
        job = LoadJob(port=self.server.port, bodies=self.bodies, clients=clients, seconds=seconds, ramp_s=0.0)
        return await run_load(job)

    async def observe(self, observed: Observed, clients: int, settings: Settings) -> None:
        """Make one pass of each kind. One at a time: none sees what another costs."""
        modes = () if settings.stop_server else ("--nonblocking",)
        await self._pass("alone", observed, clients, settings)
        async with watch_lock(self.pid, every_s=1 / settings.looks_per_s) as waits:
            await self._pass("lock watched", observed, clients, settings)
        for thread in waits.waiting:
            observed.lock_wait_s[thread] += waits.lock_wait_s(thread)
        async with record_stacks(self.pid, *modes, rate=settings.stacks_per_s) as running:
            await self._pass("sampled", observed, clients, settings)
        observed.running += running.stacks
        async with record_stacks(self.pid, *modes, "--gil", rate=settings.stacks_per_s) as locking:
            await self._pass("lock sampled", observed, clients, settings)
        observed.locking += locking.stacks

    async def _pass(self, kind: str, observed: Observed, clients: int, settings: Settings) -> None:
        """Load the server, and count what its threads spend on it."""
        before = read_clocks(self.pid)
        load = await self.load(clients, settings.seconds)
        observed.add(kind, load, clocks_since(before, self.pid))


async def measure(subject: Subject, settings: Settings) -> tuple[dict[int, Observed], dict[Thread, str]]:
    """Observe each number of clients in turns, round after round; also return the threads' names."""
    observed = {clients: Observed() for clients in settings.clients}
    names: dict[Thread, str] = {}
    await subject.load(max(settings.clients), min(4.0, settings.seconds))
    with open_progress() as progress:
        task = progress.add_task("measuring", total=settings.rounds * len(observed))
        for _ in range(settings.rounds):
            for clients, here in observed.items():
                progress.update(task, description=f"measuring: {clients} clients")
                await subject.observe(here, clients, settings)
                names |= {thread: thread_name(*thread) for thread in here.clocks["alone"] if thread not in names}
                progress.advance(task)
    return observed, names


# -- telling ------------------------------------------------------------------------------------------


def as_markdown(profile: RequestProfile) -> str:
    """Return the table of one number of clients."""
    threads = profile.threads
    rows = [[stage, *(thread.stages_us.get(stage) for thread in threads)] for stage in ORDER]
    rows = [row for row in rows if any(row[1:])]
    rows.append(["**processor time**", *(thread.cpu_us for thread in threads)])
    rows.append(["of it, holding the interpreter lock", *(thread.lock_held_us for thread in threads)])
    rows.append(["besides, waiting for the interpreter lock", *(thread.lock_wait_us for thread in threads)])
    rows.append(["besides, waiting for a core", *(thread.core_wait_us for thread in threads)])
    lines = [
        ["µs per request", *(thread.name for thread in threads), "all"],
        ["---", *("---:" for _ in threads), "---:"],
        *([name, *map(_cell, cells), _cell(sum(cell or 0.0 for cell in cells))] for name, *cells in rows),
    ]
    rates = ", ".join(f"{kind} {rate:.0f}" for kind, rate in profile.requests_per_s.items())
    title = f"## {_clients(profile)}\n\nRequests/s: {rates}."
    return "\n".join([title, "", *("| " + " | ".join(line) + " |" for line in lines)])


def _cell(us: float | None) -> str:
    return f"{us:.0f}" if us else ""


def write_tables(profiles: list[RequestProfile], settings: Settings, machine: dict[str, Any]) -> None:
    """Print the tables in Markdown, and have them written."""
    threads = os.environ.get("OMP_NUM_THREADS")
    command = f"{f'OMP_NUM_THREADS={threads} ' * bool(threads)}trio-pool-serve serve {settings.server_flags}".strip()
    title = (
        f"`{command}`, one text of {TOKENS} tokens per request, {machine['cores']} cores, commit {machine['commit']}."
    )
    text = "\n\n".join(["# One request's processor time", title, *map(as_markdown, profiles)]) + "\n"
    print(text)
    add_markdown(text)


def draw(profiles: list[RequestProfile], settings: Settings) -> None:
    """Plot a bar for each thread, its stages on top of one another; what it waits for is hatched.

    Threads that compute have a separate panel: next to them nothing else would be visible.
    """
    panels = [(profile, computing) for profile in profiles for computing in (False, True)]
    figure, axes = open_figure(len(panels))
    for axis, (profile, computing) in zip(axes, panels, strict=True):
        threads = [thread for thread in profile.threads if ("kernels" in thread.stages_us) == computing]
        _draw_threads(axis, threads)
        rate = profile.requests_per_s["alone"]
        axis.set(title=f"{_clients(profile)}, {rate:.0f} req/s", ylabel="µs per request")
    drawn = {label: bar for axis in axes for bar, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    labels = [label for label in (*ORDER, *WAITING) if label in drawn]
    figure.legend([drawn[label] for label in labels], labels, loc="outside right upper", frameon=False)
    write_figure(figure, settings.output_dir, "request_profile")


WAITING = ("waits for the lock", "waits for a core")


def _draw_threads(axis: Axes, threads: list[ThreadProfile]) -> None:
    names = [f"{thread.process}\n{thread.thread}" for thread in threads]
    bottom = np.zeros(len(names))
    for index, stage in enumerate(ORDER):
        heights = [thread.stages_us.get(stage, 0.0) for thread in threads]
        if any(heights):
            axis.bar(names, heights, bottom=bottom, label=stage, color=colormaps["tab20"](index))
            bottom += heights
    waits = ([thread.lock_wait_us for thread in threads], [thread.core_wait_us for thread in threads])
    for label, heights, hatch in zip(WAITING, waits, ("///", ".."), strict=True):
        axis.bar(names, heights, bottom=bottom, label=label, color="white", edgecolor="0.6", hatch=hatch)
        bottom += heights


def _clients(profile: RequestProfile) -> str:
    return f"{profile.clients} client{'s' * (profile.clients > 1)}"


async def run(settings: Settings) -> None:
    """Check the answers, measure, report."""
    report = Report("request_profile", settings)
    texts = Texts().make(TEXTS, TOKENS)
    async with open_ours(*shlex.split(settings.server_flags)) as server:
        subject = Subject(server, server_process(server.port), bodies_of(texts))
        checked = texts[:CHECKED_TEXTS]
        cosine = await check_answers(server.url, checked, oracle_vectors(checked))
        observed, names = await measure(subject, settings)
    cast = Cast.of(observed.values(), names)
    profiles = [make_profile(clients, here, cast) for clients, here in observed.items()]
    write_tables(profiles, settings, report.machine)
    for profile in profiles:
        if profile.other_share > MOST_OTHER:
            console.print(f"{profile.other_share:.0%} of the time has no stage: STAGES is out of date", style="yellow")
    report.write(
        omp_num_threads=os.environ.get("OMP_NUM_THREADS"),
        model=MODEL_NAME,
        tokens=TOKENS,
        least_cosine_with_float32=cosine,
        profiles=[attrs.asdict(profile) for profile in profiles],
        loads={
            clients: {kind: [attrs.asdict(result) for result in results] for kind, results in here.loads.items()}
            for clients, here in observed.items()
        },
    )
    draw(profiles, settings)


main = command_of(run)


if __name__ == "__main__":
    cyclopts.run(main)
