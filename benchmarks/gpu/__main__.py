"""Is the GPU path right, and how fast is it? One page with a row for each aim, in less than nine minutes.

Tests marked cuda; order of memory accesses; memory of full batches; overlap of copies; the real server under load. Each
part has a time budget and fails alone, and the page is written after each.

    python -m benchmarks.gpu
    python -m benchmarks.gpu --quick --against ../before   # short loads of several servers, one of another checkout
    python -m benchmarks.gpu --flags="--backend torch" --only load
    python -m benchmarks.gpu --device cpu --shape tiny --rounds 1 --seconds 1 --output-dir /tmp/gpu   # a trial
"""

import math
import sys
from collections.abc import Callable, Sequence
from functools import partial

import attrs
import cyclopts
import trio

from benchmarks.bert_shapes import write_bert, write_splade
from benchmarks.gpu import attention, cuda_tests, memory, ordering, overlap, server_load, short_loads
from benchmarks.gpu.left_processes import open_run
from benchmarks.gpu.page import cells, write_page
from benchmarks.gpu.part import Findings, Part, PartReport, Subject
from benchmarks.gpu.selected_gpu import NoGpuError, find_gpu
from benchmarks.gpu.settings import Settings
from benchmarks.machine import describe_machine
from benchmarks.report import console, open_progress

DEFAULTS = Settings()

NOT_MEASURED = "NOT MEASURED: "
"""Begins a line that ``python -m benchmarks`` puts on its page."""


async def write_models(subject: Subject, findings: Findings) -> None:
    """Write the models that the other parts load. Cancellation: once they are written."""
    del findings
    shape = subject.settings.shape
    await trio.to_thread.run_sync(write_bert, subject.bert, shape)
    await trio.to_thread.run_sync(write_splade, subject.splade, shape)


MODELS = Part(name="models", budget_s=10, run=write_models)

PARTS = (
    Part(name="tests", budget_s=110, run=cuda_tests.run, aims=(cuda_tests.FAILED,)),
    Part(
        name="ordering",
        budget_s=45,
        run=ordering.run,
        aims=(ordering.UNORDERED, ordering.UNORDERED_GRAPHS, ordering.WAITING),
    ),
    Part(name="memory", budget_s=80, run=memory.run, aims=(*memory.LARGEST.values(), memory.LOGITS)),
    Part(name="overlap", budget_s=40, run=overlap.run, aims=(*overlap.FASTER.values(), overlap.OVERLAPPED)),
    Part(
        name="load",
        budget_s=175,
        run=server_load.run,
        aims=(server_load.COSINE, *(load.aim for load in server_load.LOADS), server_load.ADDED),
    ),
)
"""Together with ``MODELS`` less than eight minutes."""


def quick_parts(*, against: bool) -> list[Part]:
    """Return the quick parts, the most important first; ``against``: with a server of another checkout.

    Together with ``MODELS`` they take ``QUICK_S``. With the other checkout, the last one may be left out.
    """
    return [
        Part(name="tests", budget_s=60, run=cuda_tests.run, aims=(cuda_tests.FAILED,)),
        short_loads.COMPILING,
        short_loads.one_engine_part(against=against),
        *short_loads.SEVERAL_ENGINES,
        attention.PART,
        *short_loads.LARGER_PARTS,
    ]


QUICK_S = 520.0
"""Limit of all quick parts together: nine minutes with what is done before and after them."""

LEAST_S = 10.0
"""A part for which less time is left is not run."""

CUT = "the run ended before it"
"""Why parts were not run, on a page that was not written again."""


async def run_parts(
    parts: Sequence[Part],
    subject: Subject,
    note_step: Callable[[str, str], None] = lambda *_: None,
    write: Callable[[Sequence[PartReport], Sequence[PartReport]], None] = lambda *_: None,
    limit_s: float = math.inf,
) -> list[PartReport]:
    """Run the parts one after the other, whatever becomes of each, for at most ``limit_s`` seconds.

    After each part, ``write`` gets the reports of the parts that have ended, and a report for each part that has not.
    Cancellation: as the running part's.
    """
    reports: list[PartReport] = []
    ends = trio.current_time() + limit_s
    for number, part in enumerate(parts, 1):
        left_s = ends - trio.current_time()
        if left_s < LEAST_S:
            reports.append(PartReport(part=part, failure=f"{limit_s:g} s were over", was_run=False))
        else:
            note_step(part.name, "")
            within = attrs.evolve(part, budget_s=min(part.budget_s, left_s / subject.settings.time_factor))
            reports.append(await within.report(attrs.evolve(subject, note_step=partial(note_step, part.name))))
        write(reports, [PartReport(part=each, failure=CUT, was_run=False) for each in parts[number:]])
    return reports


def parts_of(settings: Settings) -> tuple[list[Part], list[PartReport]]:
    """Return the parts to run; for each other part of this mode, return a report that says why it does not run."""
    of_mode = quick_parts(against=settings.against is not None) if settings.quick else [*PARTS]
    selected = [part for part in of_mode if not settings.only or part.name in settings.only]
    left_out = [PartReport(part=part, failure="--only", was_run=False) for part in of_mode if part not in selected]
    return [MODELS, *selected], left_out


async def run(settings: Settings) -> int:
    """Run all parts and write the page after each; return how many failed. Without a GPU, nothing is run or written.

    Cancellation: the running part's processes end, and the page is that of the parts before.
    """
    machine = describe_machine()
    try:
        gpu = None if settings.on_cpu else await find_gpu(settings.device)
    except NoGpuError as error:
        say(f"{NOT_MEASURED}{error}")
        console.print("--device cpu --shape tiny --output-dir FOLDER shows whether the benchmark works.")
        return 0
    parts, left_out = parts_of(settings)
    with open_run() as models, open_progress() as progress:
        task = progress.add_task("", total=len(parts))
        subject = Subject(settings=settings, bert=models / "bert", splade=models / "splade", gpu=gpu)

        def note_step(name: str, step: str) -> None:
            done = [part.name for part in parts].index(name)
            progress.update(task, description=f"{name}: {step}" if step else name, completed=done)

        def write(done: Sequence[PartReport], rest: Sequence[PartReport]) -> None:
            *_, last = done
            for row in last.rows:
                say("  ".join(cells(last.part.name, row)))
            say(f"{last.part.name}: {last.took_s:.0f} s{', failed: ' * bool(last.failure)}{last.reason}")
            if write_page([*done, *rest, *left_out], subject, machine):
                say(f"written: {settings.folder / 'gpu.md'}")

        limit_s = QUICK_S * settings.time_factor if settings.quick else math.inf
        reports = await run_parts(parts, subject, note_step, write, limit_s)
        progress.update(task, description="done", completed=len(parts))
    return sum(bool(report.failure) for report in reports)


def say(line: str) -> None:
    """Print a line."""
    console.print(line, markup=False, highlight=False, soft_wrap=True)


def main(settings: Settings = DEFAULTS) -> None:
    """Measure everything about the GPU path."""
    sys.exit(trio.run(run, settings))


if __name__ == "__main__":
    cyclopts.run(main)
