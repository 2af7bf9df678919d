"""The memory of batches that use up the token budget, compared with the batches that the budget was tried with.

Those have rows of one length: as long as the model takes them, and as many as there can be. The others must not take
more.
``python -m benchmarks.gpu.memory`` is the process that computes them.
"""

import pickle
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import trio
from attrs import define, field

from benchmarks.aim import Aim
from benchmarks.bert_shapes import VOCABULARY
from benchmarks.gpu.loaded_runner import LoadedRunner, runner_arguments
from benchmarks.gpu.part import Findings, Subject
from benchmarks.gpu.part_process import read_job, run_part_process, send_finding
from benchmarks.report import open_figure, write_figure

ALLOWED = 1.1
"""A tenth is for what each row takes by itself: lengths, and the rows of outputs."""

LARGEST = {
    model: Aim(row=f"{model}: largest peak of full batches ÷ largest of those tried at the start", at_most=ALLOWED)
    for model in ("embeddings", "SPLADE")
}

LOGITS = Aim(row="SPLADE: peak of equal long rows ÷ logits of as many tokens")
"""The budget of a model with logits is chosen by their size."""

MOST_EVENTS = 100_000
"""Maximum events of the allocator; some thousands are expected."""

MIB = 2**20

Series = list[tuple[float, float]]
"""Milliseconds, and bytes allocated then beyond the weights."""


async def run(subject: Subject, findings: Findings) -> None:
    """Measure both models, each in a process. Cancellation: at once; the process ends."""
    found: dict[str, dict[str, Any]] = {}
    try:
        for model, folder in (("embeddings", subject.bert), ("SPLADE", subject.splade)):
            subject.note_step(model)
            found[model] = {}
            snapshot = subject.settings.folder / f"gpu_memory_{model.lower()}.pickle"
            job = {"arguments": runner_arguments(folder, subject.settings), "snapshot": str(snapshot)}
            await run_part_process("benchmarks.gpu.memory", job, found[model].update)
            _judge(model, found[model], findings)
            if subject.gpu is not None:
                findings.texts.append(f"Snapshot for [memory_viz]({VIEWER}): `{snapshot.name}`, which is not committed")
    finally:
        findings.details |= {
            model: {name: value for name, value in values.items() if name != "series"}
            for model, values in found.items()
        }
    draw({model: values["series"] for model, values in found.items()}, subject.settings.folder)
    findings.texts.append("![Memory over time](gpu_memory.png)")


VIEWER = "https://pytorch.org/memory_viz"


def _judge(model: str, found: Mapping[str, Any], findings: Findings) -> None:
    peaks = {name: batch["peak_bytes"] for name, batch in found["batches"].items()}
    (_, of_long), (_, of_many), *others = peaks.items()
    too_large = [name for name, peak in peaks.items() if peak is None]
    if too_large:
        findings.not_measured(LARGEST[model], f"out of memory: {'; '.join(too_large)}")
    else:
        largest, peak = max(others, key=lambda one: one[1])
        findings.measured(LARGEST[model], peak / max(of_long, of_many), f"{peak / MIB:.0f} MiB: {largest}")
    if found["logits_bytes"] and of_long is not None:
        logits = found["logits_bytes"]
        findings.measured(LOGITS, of_long / logits, f"{of_long / MIB:.0f} MiB ÷ {logits / MIB:.0f} MiB")
    shown = {name: "out of memory" if peak is None else f"{peak / MIB:.0f}" for name, peak in peaks.items()}
    lines = [
        f"| {name} | {batch['rows']} | {batch['tokens']} | {shown[name]} |" for name, batch in found["batches"].items()
    ]
    head = f"{found['model']}; at most {found['batch_tokens']} tokens a batch:\n\n"
    table = ["| batch | rows | tokens | peak beyond the weights, MiB |", "| --- | ---: | ---: | ---: |"]
    findings.texts.append(head + "\n".join([*table, *lines]))


def draw(series: Mapping[str, Series], folder: Path) -> None:
    """Plot memory over time, a panel for each model."""
    figure, axes = open_figure(len(series))
    for axis, (model, points) in zip(axes, series.items(), strict=True):
        begin = points[0][0] if points else 0.0
        axis.step([at - begin for at, _ in points], [size / MIB for _, size in points], where="post", linewidth=0.8)
        axis.set(title=f"{model}: memory beyond the weights, MiB", xlabel="ms", ylim=(0, None))
    write_figure(figure, folder, "gpu_memory")


# -- in the process of its own ----------------------------------------------------------------------------


class Recorder(Protocol):
    """Records allocations."""

    async def peak_bytes(self, compute: Callable[[], Awaitable[Any]]) -> int:
        """Return the most memory allocated at a time while a batch is computed, beyond what was before."""

    def finish(self, snapshot: Path) -> Series:
        """Return the memory over time; on a GPU, write the snapshot."""


@define
class CudaRecorder:
    """Records what torch allocates on a GPU."""

    device: Any

    def __attrs_post_init__(self) -> None:
        import torch

        torch.cuda.synchronize(self.device)
        torch.cuda.memory._record_memory_history(stacks="python", max_entries=MOST_EVENTS)  # noqa: SLF001

    async def peak_bytes(self, compute: Callable[[], Awaitable[Any]]) -> int:
        """Return the allocator's own number."""
        import torch

        torch.cuda.synchronize(self.device)
        before = torch.cuda.memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        await compute()
        torch.cuda.synchronize(self.device)
        return torch.cuda.max_memory_allocated(self.device) - before

    def finish(self, snapshot: Path) -> Series:
        """Write the snapshot, and read from it."""
        import torch

        snapshot.parent.mkdir(parents=True, exist_ok=True)
        torch.cuda.memory._dump_snapshot(str(snapshot))  # noqa: SLF001
        torch.cuda.memory._record_memory_history(enabled=None)  # noqa: SLF001
        with snapshot.open("rb") as file:
            traces = pickle.load(file)["device_traces"]
        return allocated(traces[self.device.index or 0])


SIGNS = {"alloc": 1, "free_completed": -1}
"""Of the sizes in the allocator's events; the others are about memory that it keeps."""


def allocated(trace: Iterable[Mapping[str, Any]]) -> Series:
    """Return the memory over time from the allocator's events: what was there before them is not in it."""
    series: Series = []
    total = 0
    for event in trace:
        sign = SIGNS.get(event["action"])
        if sign is not None:
            total += sign * event["size"]
            series.append((event["time_us"] / 1e3, float(total)))
    return series


@define
class CpuRecorder:
    """Records what torch allocates on CPU, for trials."""

    _series: Series = field(factory=list)

    async def peak_bytes(self, compute: Callable[[], Awaitable[Any]]) -> int:
        """Return the most memory that the profiler has seen."""
        import torch

        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
            await compute()
        total = peak = 0
        for event in sorted(profiler.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
            if event.name() == "[memory]":
                total += event.nbytes()
                peak = max(peak, total)
                self._series.append((event.start_ns() / 1e6, float(total)))
        return peak

    def finish(self, snapshot: Path) -> Series:
        """Return the memory over time."""
        del snapshot
        return self._series


async def measure(loaded: LoadedRunner, snapshot: Path) -> None:
    """Compute each of the full batches once to have everything allocated that stays, and once more while recording."""
    from benchmarks.gpu.batches import full_batches, make_batch
    from trio_pool_serve.errors import OutOfDeviceMemoryError
    from trio_pool_serve.types import Embed, SparseEmbed

    runner = loaded.runner
    params = SparseEmbed() if SparseEmbed in runner.loaded.heads else Embed()
    full = full_batches(loaded.batch_tokens, pads=runner.facts.pads)
    batches = {name: make_batch(lengths, [params]) for name, lengths in full.items()}
    too_large = set()
    for name, batch in batches.items():
        try:
            await runner.launch(batch)
        except OutOfDeviceMemoryError:
            too_large.add(name)
    recorder: Recorder = CpuRecorder() if loaded.is_on_cpu else CudaRecorder(runner.params.device)
    found = {}
    for name, batch in batches.items():

        async def compute(batch: Any = batch) -> None:
            await runner.launch(batch)

        peak = None if name in too_large else await recorder.peak_bytes(compute)
        found[name] = {"rows": len(full[name]), "tokens": sum(full[name]), "peak_bytes": peak}
    width = VOCABULARY if SparseEmbed in runner.loaded.heads else 0
    itemsize = next(runner.loaded.backbone.model.parameters()).element_size()
    logits = width * itemsize * sum(next(iter(full.values())))
    send_finding({**loaded.describe(), "batches": found, "logits_bytes": logits})
    send_finding({"series": thinned(recorder.finish(snapshot))})


def thinned(series: Series, most: int = 20_000) -> Sequence[tuple[float, float]]:
    """Return every n-th point, so that there are few enough to draw."""
    return series[:: 1 + len(series) // most]


async def main() -> None:
    """Do the job."""
    job = read_job()
    loaded = await LoadedRunner.load(job["arguments"], in_this_thread=True)
    await measure(loaded, Path(job["snapshot"]))


if __name__ == "__main__":
    trio.run(main)
