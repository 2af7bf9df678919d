"""What the awaited copy on a side stream buys: batches through the runner with it, and with a copy that is waited for.

BERT-base with random weights in bfloat16, 64 rows of 32 tokens; one vector for each row, and one for each token. Two
batches are in flight, as in the server. Needs a GPU; elsewhere the script reports that and ends.

    python -m benchmarks.output_copy
"""

import math
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Literal, TypeAlias

import attrs
import cyclopts
import numpy as np
import torch
import trio
from attrs import define, field, frozen
from cyclopts import Parameter
from torch import Tensor

from benchmarks.bert_shapes import Shape, write_bert
from benchmarks.machine import describe_machine
from benchmarks.report import RESULTS, console, open_figure, open_progress, print_table, write_figure, write_json
from trio_pool_serve.config import ModelConfig
from trio_pool_serve.models.folder import read_model_folder
from trio_pool_serve.models.loading.runner_loading import load_runner
from trio_pool_serve.runner.output_copy import Split
from trio_pool_serve.runner.transformer_runner import TransformerRunner
from trio_pool_serve.threads.offload import Offload
from trio_pool_serve.types import (
    Batch,
    CopiedBatch,
    Embed,
    PooledBatch,
    PoolingParams,
    PoolingRequest,
    RenderedPrompt,
    TokenEmbed,
)

ROWS = 64

TOKENS = 32

IN_FLIGHT = 2

TRACED_BATCHES = 12

Way: TypeAlias = Literal["side stream", "synchronous"]

WAYS: tuple[Way, ...] = ("side stream", "synchronous")

OUTPUTS: dict[str, PoolingParams] = {"embed": Embed(), "token_embed": TokenEmbed()}


@Parameter(name="*")
@frozen(kw_only=True)
class Settings:
    """What is run: ``seconds`` per way, output and round. ``device`` is for trying the script out on CPU."""

    rounds: int = 5
    seconds: float = 3.0
    shape: Shape = "base"
    device: str = "cuda"
    output_dir: Path = RESULTS


@frozen(kw_only=True)
class Result:
    """Batches per second, and milliseconds from before a launch until the rows are there."""

    batches_per_s: float
    p50_ms: float
    p99_ms: float


class SynchronousCopier:
    """Copies while the launching thread waits, on the stream that computes: as ``tensor.cpu()`` does."""

    def start(self, tensors: Sequence[Tensor], split: Split) -> PooledBatch:
        """Return the rows."""
        return CopiedBatch(split([tensor.cpu().numpy() for tensor in tensors]))


@define
class Stream:
    """Batches one after the other, ``IN_FLIGHT`` at once."""

    runner: TransformerRunner
    offload: Offload
    batch: Batch
    latencies: list[float] = field(factory=list)

    async def run(self, seconds: float = math.inf, batches: float = math.inf) -> Result:
        """Run for some time, or for some batches."""
        begin = trio.current_time()
        free = trio.Semaphore(IN_FLIGHT)
        async with trio.open_nursery() as nursery:
            while trio.current_time() < begin + seconds and batches > 0:
                await free.acquire()
                started = time.perf_counter()
                handle = await self.offload.run("launch", partial(self.runner.launch, self.batch))
                nursery.start_soon(self._finish, handle, started, free)
                batches -= 1
        took = trio.current_time() - begin
        milliseconds = sorted(1e3 * latency for latency in self.latencies)
        return Result(
            batches_per_s=len(milliseconds) / took,
            p50_ms=milliseconds[len(milliseconds) // 2],
            p99_ms=milliseconds[math.ceil(0.99 * len(milliseconds)) - 1],
        )

    async def _finish(self, handle: PooledBatch, started: float, free: trio.Semaphore) -> None:
        await handle
        self.latencies.append(time.perf_counter() - started)
        free.release()


def make_batch(params: PoolingParams) -> Batch:
    """Return rows of random ids."""
    random = np.random.default_rng(0)
    rows = random.integers(1000, 30000, size=(ROWS, TOKENS)).astype(np.int32)
    return Batch(tuple(PoolingRequest(RenderedPrompt(row), (params,)) for row in rows))


async def measure(runner: TransformerRunner, offload: Offload, settings: Settings) -> dict[tuple[str, Way], list[Any]]:
    """Run both ways in turns, round after round."""
    copiers = {"side stream": runner.copier, "synchronous": SynchronousCopier()}
    batches = {output: make_batch(params) for output, params in OUTPUTS.items()}
    results: dict[tuple[str, Way], list[Any]] = {(output, way): [] for output in OUTPUTS for way in WAYS}
    await check(runner, offload, copiers, batches)
    with open_progress() as progress:
        for output, way in progress.track(list(results) * settings.rounds, description="measuring"):
            runner.copier = copiers[way]  # type: ignore[assignment]
            results[output, way].append(await Stream(runner, offload, batches[output]).run(settings.seconds))
    runner.copier = copiers["side stream"]  # type: ignore[assignment]
    return results


async def check(runner: TransformerRunner, offload: Offload, copiers: Any, batches: dict[str, Batch]) -> None:
    """Both ways give the same rows; raises ``AssertionError`` if not. What is allocated on first use is there then."""
    for batch in batches.values():
        answers = []
        for way in WAYS:
            runner.copier = copiers[way]
            rows = await (await offload.run("launch", partial(runner.launch, batch)))
            answers.append(np.array([value for (value,) in rows]))
        np.testing.assert_array_equal(*answers)


async def trace(runner: TransformerRunner, offload: Offload, settings: Settings) -> None:
    """Write what host and device do during a few batches of large outputs, for https://ui.perfetto.dev."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if settings.device != "cpu":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    profiler = torch.profiler.profile(activities=activities)
    # The host's side is that of the thread which starts it: the one that launches.
    await offload.run("launch", profiler.start)
    await Stream(runner, offload, make_batch(TokenEmbed())).run(batches=TRACED_BATCHES)
    await offload.run("launch", profiler.stop)
    settings.output_dir.mkdir(parents=True, exist_ok=True)
    profiler.export_chrome_trace(str(settings.output_dir / "output_copy_trace.json.gz"))
    console.print("written: output_copy_trace.json.gz", highlight=False)


def ratio(results: dict[tuple[str, Way], list[Any]], output: str) -> float:
    """Return the throughput with the side stream over that without: the median of each round's."""
    pairs = zip(*(results[output, way] for way in WAYS), strict=True)
    return median(side.batches_per_s / synchronous.batches_per_s for side, synchronous in pairs)


def report(results: dict[tuple[str, Way], list[Any]], document: dict[str, Any], settings: Settings) -> None:
    """Print a table, write JSON and a plot."""

    def middle(key: tuple[str, Way], quantity: str) -> float:
        return median(getattr(result, quantity) for result in results[key])

    rows = [
        [f"{output}, {way}", *(f"{middle((output, way), name):.2f}" for name in ("batches_per_s", "p50_ms", "p99_ms"))]
        for output, way in results
    ]
    print_table(f"{ROWS} rows of {TOKENS} tokens", ["output", "batches/s", "p50 ms", "p99 ms"], rows)
    ratios = {output: ratio(results, output) for output in OUTPUTS}
    measured = [
        {"output": output, "way": way, "rounds": [attrs.asdict(result) for result in rounds]}
        for (output, way), rounds in results.items()
    ]
    write_json(settings.output_dir, "output_copy", {**document, "throughput_ratio": ratios, "results": measured})
    figure, axes = open_figure(2)
    for axis, (quantity, title) in zip(
        axes, (("batches_per_s", "Batches per second"), ("p50_ms", "Latency, ms (median)")), strict=True
    ):
        for index, way in enumerate(WAYS):
            places = np.arange(len(OUTPUTS)) + 0.4 * index - 0.2
            axis.bar(places, [middle((output, way), quantity) for output in OUTPUTS], width=0.4, label=way)
        axis.set(title=title, ylim=(0, None))
        axis.set_xticks(range(len(OUTPUTS)), list(OUTPUTS))
        axis.legend(frameon=False)
    write_figure(figure, settings.output_dir, "output_copy")


async def run(settings: Settings) -> None:
    """Load the model, measure, report."""
    machine = describe_machine()
    if settings.device != "cpu":
        machine["gpu"] = torch.cuda.get_device_name(settings.device)
    offload = Offload(copy=IN_FLIGHT)
    with tempfile.TemporaryDirectory() as folder:
        path = write_bert(Path(folder), settings.shape)
        load = partial(
            load_runner, read_model_folder(path), ModelConfig(device=settings.device, dtype="bfloat16"), offload
        )
        runner = await offload.run("launch", load)
    results = await measure(runner, offload, settings)
    await trace(runner, offload, settings)
    offload.close()
    document = {
        "machine": machine,
        "settings": attrs.asdict(settings, filter=lambda attribute, _: attribute.name != "output_dir"),
        "model": runner.describe(),
        "rows": ROWS,
        "tokens": TOKENS,
        "in_flight": IN_FLIGHT,
    }
    report(results, document, settings)


def main(settings: Settings = Settings()) -> None:
    """Measure batches through the runner, with copies that are awaited and with copies that are waited for."""
    if settings.device != "cpu" and not torch.cuda.is_available():
        console.print("There is no GPU: on CPU nothing is copied, so there is nothing to measure.")
        return
    trio.run(run, settings)


if __name__ == "__main__":
    cyclopts.run(main)
