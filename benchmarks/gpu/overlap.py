"""The overlap of a batch's output copy with the computation of the next batch, and its gain.

64 rows of 32 tokens, one vector for each row and one for each token, copied on a side stream, and by the launching
thread, in turns. What happens when is traced with full batches: a fast GPU has computed 64 rows before the next batch
is launched. ``python -m benchmarks.gpu.overlap`` is the process that measures.
"""

import gzip
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import trio
from attrs import evolve

from benchmarks.aim import Aim
from benchmarks.gpu.loaded_runner import LoadedRunner, runner_arguments
from benchmarks.gpu.part import Findings, Subject
from benchmarks.gpu.part_process import read_job, run_part_process, send_finding
from benchmarks.report import open_figure, write_figure
from benchmarks.rounds import Rounds

ROWS = 64

TOKENS = 32

OUTPUTS = ("embed", "token_embed")

SIDE, SYNCHRONOUS = WAYS = ("side stream", "synchronous")

FASTER = {
    output: Aim(row=f"{output}: batches/s, copies on a side stream ÷ synchronous copies", at_least=1.03)
    for output in OUTPUTS
}

OVERLAPPED = Aim(row="token_embed, full batches: share of copies during which the next one is computed", at_least=0.5)

TRACED_BATCHES = 12

DIFFERENCE = 1e-2
"""Between components of the same vectors: kernels may add in another order."""

MOST_SECONDS = 1.0
"""For each way, output and round."""

Interval: TypeAlias = tuple[float, float]
"""Milliseconds: begin and end."""


async def run(subject: Subject, findings: Findings) -> None:
    """Measure in a process. Cancellation: at once; the process ends."""
    settings, found = subject.settings, dict[str, Any]()
    job: dict[str, Any] = {
        "arguments": runner_arguments(subject.bert, settings),
        "rounds": settings.rounds,
        "seconds": min(MOST_SECONDS, settings.seconds),
        "trace": str(settings.folder / "gpu_trace.json.gz"),
    }

    def note(finding: dict[str, Any]) -> None:
        found.update(finding)
        subject.note_step(", ".join(finding))

    try:
        await run_part_process("benchmarks.gpu.overlap", job, note)
    finally:
        findings.details |= found
        _judge(found, subject, findings)
    draw(found["trace"], settings.folder)
    findings.texts.append("![Launches, kernels and copies](gpu_overlap.png)")
    findings.texts.append(f"The whole trace, for [Perfetto](https://ui.perfetto.dev): {Path(job['trace']).name}")


def _judge(found: Mapping[str, Any], subject: Subject, findings: Findings) -> None:
    for output, ratio in found.get("ratios", {}).items():
        if subject.gpu is None:
            findings.not_measured(FASTER[output], f"on CPU nothing is copied; {ratio:.2f} shows how much rounds differ")
        else:
            rates = ", ".join(f"{way} {found['rates'][output][way]:.0f}/s" for way in WAYS)
            findings.measured(FASTER[output], ratio, rates)
    if "trace" not in found:
        return
    kernels, copies = found["trace"]["kernels"], found["trace"]["copies"]
    share = overlapped_share(copies, kernels)
    if share is None:
        findings.not_measured(OVERLAPPED, f"the trace has {len(kernels)} kernels and {len(copies)} copies")
    else:
        findings.measured(OVERLAPPED, share, f"{len(copies)} copies")


def overlapped_share(copies: Sequence[Interval], kernels: Sequence[Interval]) -> float | None:
    """Return the share of copies during which a kernel runs; ``None`` if there are too few to tell.

    The last copy does not count: no batch follows it. A copy begins when all kernels of its batch have ended.
    """
    followed = sorted(copies)[:-1]
    if not followed or not kernels:
        return None
    overlapped = [any(began < end and ended > begin for began, ended in kernels) for begin, end in followed]
    return sum(overlapped) / len(overlapped)


def intervals(events: Iterable[Mapping[str, Any]]) -> dict[str, list[Interval]]:
    """Return launches, kernels and copies to the host from the events of a Chrome trace."""
    from benchmarks.gpu.batch_stream import LAUNCH

    found: dict[str, list[Interval]] = {"launches": [], "kernels": [], "copies": []}
    for event in events:
        category, name = event.get("cat"), event.get("name", "")
        is_copy = category == "gpu_memcpy" and "DtoH" in name
        is_launch = category == "user_annotation" and name == LAUNCH
        kind = "copies" if is_copy else "kernels" if category == "kernel" else "launches" if is_launch else None
        if kind is not None:
            begin = event["ts"] / 1e3
            found[kind].append((begin, begin + event["dur"] / 1e3))
    return found


COLOURS = {"launches": "C2", "kernels": "C0", "copies": "C1"}


def draw(trace: Mapping[str, Sequence[Interval]], folder: Path) -> None:
    """Plot what happens when, a line for each kind."""
    figure, (axis,) = open_figure(1)
    figure.set_size_inches(14, 3)
    begin = min((begin for kind in trace.values() for begin, _ in kind), default=0.0)
    for place, (kind, spans) in enumerate(trace.items()):
        bars = [(start - begin, end - start) for start, end in spans]
        axis.broken_barh(bars, (-place - 0.4, 0.8), color=COLOURS[kind], edgecolor="white", linewidth=0.1)
    axis.set(title=f"{TRACED_BATCHES} full batches of token vectors", xlabel="ms", ylim=(0.5 - len(trace), 0.5))
    axis.set_yticks([-place for place in range(len(trace))], list(trace))
    write_figure(figure, folder, "gpu_overlap")


# -- in the process of its own ----------------------------------------------------------------------------


async def measure(loaded: LoadedRunner, rounds: int, seconds: float) -> None:
    """Send the ratios of both outputs, and the median rates: both ways in turns, round after round."""
    import numpy as np

    from benchmarks.gpu.batch_stream import BatchStream, SynchronousCopier

    runner = loaded.runner
    ways = {SIDE: loaded, SYNCHRONOUS: evolve(loaded, runner=evolve(runner, copier=SynchronousCopier()))}
    batches = _batches()
    for batch in batches.values():
        answers = []
        for way in WAYS:  # what is allocated on first use is there then
            rows = await BatchStream(ways[way], batch).run_once()
            answers.append(np.array([value for (value,) in rows]))
        np.testing.assert_allclose(answers[0], answers[1], rtol=0, atol=DIFFERENCE)
    measured = Rounds[tuple[str, str]]()
    for number in range(rounds):
        for output, batch in batches.items():
            for way in WAYS if number % 2 else reversed(WAYS):
                measured.add((output, way), await BatchStream(ways[way], batch).run(seconds))
    send_finding(
        {
            "ratios": {
                output: measured.ratio((output, SIDE), "batches_per_s", (output, SYNCHRONOUS)) for output in OUTPUTS
            },
            "rates": {
                output: {way: measured.median((output, way), "batches_per_s") for way in WAYS} for output in OUTPUTS
            },
            "results": measured.as_document("output", "way"),
        }
    )


async def trace(loaded: LoadedRunner, path: Path) -> None:
    """Write what host and device do during a few batches, and send when."""
    import torch

    from benchmarks.gpu.batch_stream import BatchStream
    from trio_pool_serve.engine.local_device import MAX_IN_FLIGHT

    activities = [torch.profiler.ProfilerActivity.CPU]
    if not loaded.is_on_cpu:
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    profiler = torch.profiler.profile(activities=activities)
    stream = BatchStream(loaded, _batches(loaded.batch_tokens // TOKENS)["token_embed"])
    await stream.run(batches=MAX_IN_FLIGHT)  # what is allocated on first use is there then
    # The host's side is that of the thread which starts it: the one that launches.
    await loaded.offload.run("launch", profiler.start)
    await stream.run(batches=TRACED_BATCHES)
    await loaded.offload.run("launch", profiler.stop)
    path.parent.mkdir(parents=True, exist_ok=True)
    profiler.export_chrome_trace(str(path))
    with gzip.open(path, "rt") as file:
        send_finding({"trace": intervals(json.load(file)["traceEvents"])})


def _batches(rows: int = ROWS) -> dict[str, Any]:
    from benchmarks.gpu.batches import make_batch
    from trio_pool_serve.types import Embed, TokenEmbed

    params = dict(zip(OUTPUTS, (Embed(), TokenEmbed()), strict=True))
    return {output: make_batch([TOKENS] * rows, [param]) for output, param in params.items()}


async def main() -> None:
    """Do the job."""
    job = read_job()
    loaded = await LoadedRunner.load(job["arguments"])
    send_finding(loaded.describe())
    await measure(loaded, job["rounds"], job["seconds"])
    await trace(loaded, Path(job["trace"]))
    loaded.offload.close()


if __name__ == "__main__":
    trio.run(main)
