"""The forward passes of a table's planned batches, and nothing else: what ``benchmarks.bulk`` compares with.

Rows are rendered before, and nothing is written.
"""

import json
import time
from pathlib import Path

import trio

from trio_pool_serve.bulk.bulk_options import OwnModelOptions, TaskOptions, TextOptions
from trio_pool_serve.bulk.own_engine import OwnEngine, open_own_engine
from trio_pool_serve.bulk.run import WINDOW_ROWS
from trio_pool_serve.engine.planned_window import planned
from trio_pool_serve.engine.queue_entry import QueueEntry
from trio_pool_serve.prompts import RenderingParams, TextPrompt
from trio_pool_serve.types import Batch, PoolingRequest, Runner

WINDOWS = 8


async def batches_of(engine: OwnEngine, path: Path) -> tuple[list[Batch], float]:
    """Return the planned batches of the first windows of a table, and the share of their tokens that is padding."""
    model = engine.service.model()
    batches: list[Batch] = []
    with path.open() as lines:
        for _ in range(WINDOWS):
            texts = [json.loads(line)["text"] for line, _ in zip(lines, range(WINDOW_ROWS), strict=False)]
            rendered = await model.renderer.render_plain(
                [(TextPrompt(text), RenderingParams(), False) for text in texts]
            )
            entries = [QueueEntry(PoolingRequest(prompt)) for (prompt,) in rendered]
            batches += [
                Batch(tuple(entry.request for entry in batch))
                for batch in planned(entries, model.engine.facts.max_batch_tokens)
            ]
    tokens, padded = sum(batch.tokens for batch in batches), sum(batch.padded_tokens for batch in batches)
    return batches, 1 - tokens / padded


async def measure(model: str, path: Path, seconds: float) -> dict[str, float]:
    """Launch the batches from as many threads as the engine has, for some seconds; return rows/s and the padding.

    The padding is its share of the tokens. Cancellation: after the batches in flight.
    """
    task = TaskOptions(task="embed", columns=("text",))
    async with open_own_engine(model, OwnModelOptions(), task, TextOptions()) as engine:
        batches, padding = await batches_of(engine, path)
        runner: Runner = engine.service.default.engine.worker.loaded  # type: ignore[union-attr]
        rows, ends = 0, time.perf_counter() + seconds
        turn = iter(batches * 1_000_000)

        async def launch_until_the_end() -> None:
            nonlocal rows
            while time.perf_counter() < ends:
                batch = next(turn)
                handle = await engine.service.offload.run("launch", lambda batch=batch: runner.launch(batch))  # type: ignore[misc]
                await handle
                rows += len(batch.requests)

        began = time.perf_counter()
        async with trio.open_nursery() as nursery:
            for _ in range(runner.concurrent_launches):
                nursery.start_soon(launch_until_the_end)
        return {"rows_per_s": rows / (time.perf_counter() - began), "padding": padding}


def measure_here(model: str, path: Path, seconds: float) -> dict[str, float]:
    """Return what ``measure`` does; for a process that does nothing else."""
    return trio.run(measure, model, path, seconds)
