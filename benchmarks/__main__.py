"""All benchmarks, one after the other, and one page of their results.

python -m benchmarks            # a few rounds of everything, to see that it works
python -m benchmarks --full     # the real thing, on a machine that does nothing else
"""

import importlib
import importlib.util
import json
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import attrs
import cyclopts
import trio
from attrs import Factory, define, field, frozen
from cyclopts import Parameter

from benchmarks.report import RESULTS, console, open_progress
from benchmarks.servers import ROOT, STOP_TIMEOUT_S

NOT_MEASURED = "NOT MEASURED: "

SECOND = {"rounds": 1, "seconds": 0.5}
"""What a quick run changes, where a script has such settings."""


@frozen
class Script:
    """A benchmark. ``quick`` are the settings that a quick run changes, if the script has them."""

    name: str
    quick: Mapping[str, Any] = Factory(lambda: dict(SECOND))

    @property
    def module_name(self) -> str:
        """The dotted name of its module."""
        return f"benchmarks.{self.name}"

    @property
    def module(self) -> ModuleType:
        """The script's own code."""
        spec = importlib.util.find_spec(self.module_name)
        is_package = spec is not None and spec.submodule_search_locations is not None
        return importlib.import_module(f"{self.module_name}.__main__" if is_package else self.module_name)

    @property
    def question(self) -> str:
        """The question it answers: the first line of its docstring."""
        return (self.module.__doc__ or self.name).splitlines()[0]

    def command(self, folder: Path, *, quick: bool) -> list[str]:
        """Return the command that writes results to ``folder``."""
        command = [sys.executable, "-m", self.module_name, "--output-dir", str(folder)]
        known = attrs.fields_dict(self.module.Settings) if hasattr(self.module, "Settings") else {}
        for name, value in self.quick.items() if quick else ():
            if name in known:
                values = value if isinstance(value, tuple) else (value,)
                command += [f"--{name.replace('_', '-')}", *map(str, values)]
        return command


SCRIPTS = (
    Script("responsiveness"),
    Script("scheduling"),
    Script("peers", {**SECOND, "clients": (1, 8), "tokens": (32, 128), "batches": (1, 16)}),
    Script("static", {**SECOND, "rows": 2000}),
    Script("engine_rows", {"rounds": 1, "total": 3280}),
    Script("api_rate"),
    Script("engine_links", {**SECOND, "clients": (1,), "model": "tiny", "cuts": 1}),
    Script("scaling_constants", {"rounds": 1, "repeats": 2, "seconds": 0.5, "links": 10}),
    Script("launch_time", {"rounds": 1, "repeats": 5}),
    Script("request_walk"),
    Script("wake_ups"),
    Script("request_profile"),
    Script("gpu"),
    Script("first_answer", {"rounds": 1}),
    Script("start_up", {"rounds": 1, "mixed_requests": 60}),
    Script("memory_growth", {"rounds": 1, "requests": 60, "every": 30, "idle_s": 0.5}),
    Script("overload", {"rounds": 1, "seconds": 3.0, "capacity_seconds": 1.0, "factors": (2.0,), "timeout_s": 5.0}),
    Script("refusal_costs", {"rounds": 1, "requests": 32}),
    Script("chaos", {"rounds": 1, "requests": 200, "warm": 50, "kills": 1, "idle_s": 0.5}),
    Script("neighbours", {"rounds": 1, "seconds": 2.0, "capacity_seconds": 1.0, "timeout_s": 5.0}),
    Script("hostile_clients", {"rounds": 1, "seconds": 2.0, "slow_seconds": 2.0}),
    Script("soak", {"rounds": 1, "minutes": 0.1, "every_s": 1.0}),
    Script("adapters", {"rounds": 1, "seconds": 2.0}),
    Script("adapted_graphs", {"rounds": 1}),
    Script("models_at_run_time", {"rounds": 1, "seconds": 3.0, "changes": 4}),
    Script("beside_a_batch", {"rounds": 1, "seconds": 3.0}),
    Script("bulk", {"rounds": 1, "rows": 20_000, "seconds": 2.0, "every_s": 1.0}),
    Script("quality", {"dtypes": ("float32",)}),
    Script("aims"),
)
"""In the order in which they are run; the last one also reads what those before it found."""


@Parameter(name="*")
@frozen(kw_only=True)
class Settings:
    """The settings. ``only``: names of the scripts to run.

    Results go to ``benchmarks/results``, those of a quick run to a folder inside it.
    """

    full: Annotated[bool, Parameter(negative=())] = False
    quick: Annotated[bool, Parameter(negative=())] = False
    only: Annotated[tuple[str, ...], Parameter(consume_multiple=True, negative=())] = ()
    output_dir: Path | None = None

    def __attrs_post_init__(self) -> None:
        if self.full and self.quick:
            raise ValueError("--full or --quick, not both")
        unknown = set(self.only) - {script.name for script in SCRIPTS}
        if unknown:
            raise ValueError(f"there is no benchmark {', '.join(sorted(unknown))}")

    @property
    def folder(self) -> Path:
        """Where results go."""
        return (self.output_dir or (RESULTS if self.full else RESULTS / "quick")).resolve()

    @property
    def scripts(self) -> list[Script]:
        """The scripts to run."""
        return [script for script in SCRIPTS if not self.only or script.name in self.only]


@define
class Outcome:
    """Which scripts have results, and what was not measured, and why."""

    done: list[Script] = field(factory=list)
    left_out: list[str] = field(factory=list)
    failed: list[str] = field(factory=list)


async def run_all(settings: Settings) -> Outcome:
    """Run the scripts, each in a separate process; if one fails, the others still run."""
    outcome = Outcome()
    with open_progress() as progress:
        task = progress.add_task("", total=len(settings.scripts))
        for script in settings.scripts:
            progress.update(task, description=script.name)
            await _run_one(script, settings, outcome)
            progress.advance(task)
        progress.update(task, description="done")
    return outcome


async def _run_one(script: Script, settings: Settings, outcome: Outcome) -> None:
    try:
        command = script.command(settings.folder, quick=not settings.full)
    except ImportError as error:
        outcome.failed.append(script.name)
        console.print(f"{script.name} FAILED: {error}", style="bold red", markup=False)
        return
    began = trio.current_time()
    # COLUMNS: the script's output is parsed by line, so lines must not wrap.
    ended = await trio.run_process(
        ["env", "COLUMNS=200", *command],
        cwd=ROOT,
        check=False,
        capture_stdout=True,
        capture_stderr=True,
        deliver_cancel=_interrupt,
    )
    output = ended.stdout.decode(errors="replace").splitlines()
    outcome.left_out += [
        f"{script.name}: {line.removeprefix(NOT_MEASURED)}" for line in output if line.startswith(NOT_MEASURED)
    ]
    if ended.returncode:
        outcome.failed.append(script.name)
        console.print(f"{script.name} FAILED:", style="bold red")
        complaint = [*output, *ended.stderr.decode(errors="replace").splitlines()]
        console.print("\n".join(complaint[-30:]), markup=False, highlight=False)
    else:
        outcome.done.append(script)
        console.print(f"{script.name}: {trio.current_time() - began:.0f} s", highlight=False)


async def _interrupt(process: trio.Process) -> None:
    """End a script in the way that lets it stop its servers."""
    process.send_signal(signal.SIGINT)
    await trio.sleep(STOP_TIMEOUT_S)
    process.kill()


def page(outcome: Outcome, folder: Path, *, quick: bool) -> str:
    """Return the folder's results as one page of Markdown: those of this run, and earlier ones of other scripts."""
    parts = ["# Results"]
    if quick:
        parts.append("This was a quick run: these numbers mean nothing.")
    parts.append(_machine(outcome.done, folder))
    missing = [*outcome.left_out, *(f"{name}: it failed" for name in outcome.failed)]
    if missing:
        parts += ["## Not measured", "\n".join(f"- {line}" for line in missing)]
    for script in SCRIPTS:
        table, plot = folder / f"{script.name}.md", folder / f"{script.name}.png"
        if script not in outcome.done and not table.exists():
            continue
        parts += [f"## {script.name}", script.question]
        if table.exists():
            parts.append(table.read_text().strip())
        if plot.exists():
            parts.append(f"![{script.name}]({plot.name})")
    return "\n\n".join(parts) + "\n"


def _machine(done: Sequence[Script], folder: Path) -> str:
    """Return what was measured on, as the first script found it: after that, the load is that of the scripts."""
    documents = [
        json.loads(path.read_text()) for path in (folder / f"{script.name}.json" for script in done) if path.exists()
    ]
    machines = [document["machine"] for document in documents if "machine" in document]
    if not machines:
        return "Nothing was measured."
    machine = machines[0]
    packages = ", ".join(f"{name} {version}" for name, version in machine["packages"].items())
    rows = [(name.replace("_", " "), value) for name, value in machine.items() if name != "packages"]
    lines = ["| machine | |", "| --- | --- |", *(f"| {name} | {value} |" for name, value in rows)]
    return "\n".join([*lines, f"| packages | {packages} |"])


async def run(settings: Settings) -> int:
    """Run the scripts and write the page; return how many failed."""
    outcome = await run_all(settings)
    settings.folder.mkdir(parents=True, exist_ok=True)
    written = settings.folder / "README.md"
    written.write_text(page(outcome, settings.folder, quick=not settings.full))
    for line in outcome.left_out:
        console.print(NOT_MEASURED + line, style="bold red", markup=False, highlight=False, soft_wrap=True)
    console.print(f"written: {written}", highlight=False, soft_wrap=True)
    return len(outcome.failed)


def main(settings: Settings = Settings()) -> None:
    """Run all benchmarks."""
    sys.exit(trio.run(run, settings))


if __name__ == "__main__":
    cyclopts.run(main)
