"""Is the GPU path right, and how fast is it? One page with a row for each aim, in less than eight minutes.

Tests marked cuda; order of memory accesses; memory of full batches; overlap of copies; the real server under load. Each
part has a time budget and fails alone.

    python -m benchmarks.gpu
    python -m benchmarks.gpu --flags="--backend torch" --only load
    python -m benchmarks.gpu --device cpu --shape tiny --rounds 1 --seconds 1 --output-dir /tmp/gpu   # a trial
"""

import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import attrs
import cyclopts
import trio

from benchmarks.bert_shapes import write_bert, write_splade
from benchmarks.gpu import cuda_tests, memory, ordering, overlap, server_load
from benchmarks.gpu.page import write_page
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


MODELS = Part(name="models", budget_s=25, run=write_models)

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


async def run_parts(
    parts: Sequence[Part], subject: Subject, note_step: Callable[[str, str], None] = lambda *_: None
) -> list[PartReport]:
    """Run the parts one after the other, whatever becomes of each. Cancellation: as the running part's."""
    reports = []
    for part in parts:
        note_step(part.name, "")
        reports.append(await part.report(attrs.evolve(subject, note_step=partial(note_step, part.name))))
    return reports


async def run(settings: Settings) -> int:
    """Run all parts and write the page; return how many failed. Without a GPU, nothing is run or written.

    Cancellation: the running part's processes end, and nothing is written.
    """
    machine = describe_machine()
    try:
        gpu = None if settings.on_cpu else await find_gpu(settings.device)
    except NoGpuError as error:
        console.print(f"{NOT_MEASURED}{error}", markup=False, highlight=False, soft_wrap=True)
        console.print("--device cpu --shape tiny --output-dir FOLDER shows whether the benchmark works.")
        return 0
    parts = [MODELS, *(part for part in PARTS if not settings.only or part.name in settings.only)]
    with tempfile.TemporaryDirectory() as temporary, open_progress() as progress:
        models = Path(temporary)
        task = progress.add_task("", total=len(parts))

        def note_step(name: str, step: str) -> None:
            done = [part.name for part in parts].index(name)
            progress.update(task, description=f"{name}: {step}" if step else name, completed=done)

        subject = Subject(settings=settings, bert=models / "bert", splade=models / "splade", gpu=gpu)
        reports = await run_parts(parts, subject, note_step)
        progress.update(task, description="done", completed=len(parts))
    left_out = [PartReport(part=part, failure="left out: --only") for part in PARTS if part not in parts]
    write_page([*reports, *left_out], subject, machine)
    return sum(bool(report.failure) for report in reports)


def main(settings: Settings = DEFAULTS) -> None:
    """Measure everything about the GPU path."""
    sys.exit(trio.run(run, settings))


if __name__ == "__main__":
    cyclopts.run(main)
