"""The forward passes of a table's planned batches, and nothing else: what ``benchmarks.bulk`` compares with.

Rows are rendered before, and nothing is written.
"""

import itertools
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import trio

from benchmarks.graphs import compile_graph, graph_of
from benchmarks.offline import thread_counts
from trio_pool_serve.bulk.bulk_options import OwnModelOptions, TextOptions
from trio_pool_serve.bulk.own_engine import OwnEngine, open_own_engine
from trio_pool_serve.bulk.table_task import TaskOptions
from trio_pool_serve.engine.planned_window import planned
from trio_pool_serve.engine.queue_entry import QueueEntry
from trio_pool_serve.prompts import RenderingParams, TextPrompt
from trio_pool_serve.runner.batch_rows import Rows
from trio_pool_serve.runs.tables.table_windows import WINDOW_ROWS
from trio_pool_serve.types import Batch, PoolingRequest

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


async def measure(model: str, path: Path, seconds: float) -> dict[str, Any]:
    """Compute the batches for some seconds; return rows/s, the padding as its share of the tokens, and what computes.

    OpenVINO computes the engine's own graph from arrays that are made before, a batch on each core. If torch computes
    the model, the engine's runner does here. Cancellation: after the batches in flight.
    """
    task = TaskOptions(task="embed", columns=("text",))
    async with open_own_engine(model, OwnModelOptions(), task, TextOptions()) as engine:
        batches, padding = await batches_of(engine, path)
        runner: Any = engine.service.models.find().engine.devices.device.runner  # type: ignore[union-attr]
    computes, inputs, graph = [runner.launch], batches, graph_of(runner)
    if graph is not None:
        cores = thread_counts()[-1]
        compiled = compile_graph(graph, cores, streams=cores)
        names = [of_model.any_name for of_model in compiled.inputs]
        inputs = [Rows(batch.requests, runner.model.pad_token_id).arrays(names) for batch in batches]
        requests = [compiled.create_infer_request() for _ in range(cores)]
        computes = [partial(request.infer, share_inputs=True, share_outputs=True) for request in requests]
    rows, turn = 0, itertools.cycle(zip(inputs, batches, strict=True))

    async def compute_until(end: float, compute: Callable[[Any], Any]) -> None:
        nonlocal rows
        while time.perf_counter() < end:
            of_batch, batch = next(turn)
            await trio.to_thread.run_sync(compute, of_batch)
            rows += len(batch.requests)

    for lasts_s in (seconds / 4, seconds):  # first a part that does not count: kernels are made for each shape
        rows, began = 0, time.perf_counter()
        async with trio.open_nursery() as nursery:
            for compute in computes:
                nursery.start_soon(compute_until, began + lasts_s, compute)
    took = time.perf_counter() - began
    return {"rows_per_s": rows / took, "padding": padding, "by": graph.name if graph else "torch"}


def measure_here(model: str, path: Path, seconds: float) -> dict[str, Any]:
    """Return what ``measure`` does; for a process that does nothing else."""
    return trio.run(measure, model, path, seconds)
