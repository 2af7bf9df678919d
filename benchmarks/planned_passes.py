"""The forward passes of a table's planned batches, and nothing else: what ``benchmarks.bulk`` compares with.

Rows are rendered before, and nothing is written.
"""

import json
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import trio

from benchmarks.engines import compile_graph, file_of
from benchmarks.offline import thread_counts
from trio_pool_serve.bulk.bulk_options import OwnModelOptions, TaskOptions, TextOptions
from trio_pool_serve.bulk.own_engine import OwnEngine, open_own_engine
from trio_pool_serve.bulk.run import WINDOW_ROWS
from trio_pool_serve.engine.planned_window import planned
from trio_pool_serve.engine.queue_entry import QueueEntry
from trio_pool_serve.prompts import RenderingParams, TextPrompt
from trio_pool_serve.runner.openvino.inputs import PaddedRows
from trio_pool_serve.types import Batch, PoolingRequest

WINDOWS = 8

Shape = tuple[int, int]
"""Rows and tokens of a batch."""


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

    OpenVINO computes the engine's own graph, from arrays that are made before: one batch at a time on all cores, and
    one on each core. The faster way counts. If torch computes the model, the engine's runner does here.
    Cancellation: after the batches in flight.
    """
    task = TaskOptions(task="embed", columns=("text",))
    async with open_own_engine(model, OwnModelOptions(), task, TextOptions()) as engine:
        batches, padding = await batches_of(engine, path)
        runner: Any = engine.service.default.engine.worker.loaded  # type: ignore[union-attr]
        shapes = [(len(batch.requests), max(request.tokens for request in batch.requests)) for batch in batches]
        file, cores, rates = file_of(runner), thread_counts()[-1], []
        if file is None:
            rates.append(await rate([runner.launch], list(zip(shapes, batches, strict=True)), seconds))
        for streams in {1, cores} if file else ():
            compiled = compile_graph(file, cores, streams)
            names = [of_model.any_name for of_model in compiled.inputs]
            arrays = [PaddedRows(batch.requests, runner.model.pad_token_id).arrays(names) for batch in batches]
            requests = [compiled.create_infer_request() for _ in range(streams)]
            infer = [partial(request.infer, share_inputs=True, share_outputs=True) for request in requests]
            rates.append(await rate(infer, list(zip(shapes, arrays, strict=True)), seconds / 2))
    return {"rows_per_s": max(rates), "padding": padding, "by": file.name if file else "torch"}


async def rate(computes: Sequence[Callable[[Any], Any]], batches: Sequence[tuple[Shape, Any]], seconds: float) -> float:
    """Return the rows/s of batches, each computed by whichever of ``computes`` is free."""
    for batch in dict(batches).values():  # kernels are made for each shape
        for compute in computes:
            compute(batch)
    done, turn = 0, cycle(batches)
    began = time.perf_counter()

    async def compute_until_the_end(compute: Callable[[Any], Any]) -> None:
        nonlocal done
        while time.perf_counter() < began + seconds:
            (rows, _), batch = next(turn)
            await trio.to_thread.run_sync(compute, batch)
            done += rows

    async with trio.open_nursery() as nursery:
        for compute in computes:
            nursery.start_soon(compute_until_the_end, compute)
    return done / (time.perf_counter() - began)


def measure_here(model: str, path: Path, seconds: float) -> dict[str, Any]:
    """Return what ``measure`` does; for a process that does nothing else."""
    return trio.run(measure, model, path, seconds)
