"""What a launch asks of the simulated GPU, for each kind of model and way to compute it.

python -m tests.simgpu.launch_counts    # writes the record of docs/gpu-launches.md
"""

import gc
import json
import tempfile
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import trio
from attrs import frozen

from tests.kept_folders import keeping_in
from tests.simgpu.activity import Activity, watched
from tests.simgpu.memory import MEMORY
from tests.simgpu.serving import BATCH_TOKENS, KINDS, WAYS, Kind, Way, on_simulated_device
from trio_pool_serve.engine.batching import FREE_PADDING_DIVISOR, BatchBudget
from trio_pool_serve.runner.transformer_runner import TransformerRunner
from trio_pool_serve.types import Batch, PoolingRequest, RenderedPrompt

RECORD = Path(__file__).parents[2] / "docs" / "gpu_launches.json"

SHORT = 2
"""Tokens of the rows beside the long one in the most uneven batch."""


@frozen(kw_only=True)
class LaunchCounts:
    """Of one launch; ``peak_share`` is ``None`` for models whose inputs are images."""

    launches: int
    to_device_bytes: int
    to_host_bytes: int
    blocking_copies: int
    synchronisations: int
    peak_share: float | None


@frozen
class Launched:
    """One launch: what it asked for, and its output."""

    activity: Activity
    counts: LaunchCounts
    rows: list[Any]


async def launch(kind: Kind, path: Path, way: Way, batch: Batch) -> Launched:
    """Load a model onto the device, launch a batch, and wait for its output."""
    with on_simulated_device():
        runner = kind.serve(path, fits=False, **WAYS[way]).runner
        gc.collect()
        MEMORY.peak = before = MEMORY.in_use
        runner = runner.fitted(BATCH_TOKENS)
        budget = runner.facts.max_batch_tokens
        promised = MEMORY.peak - before
        with watched() as activity:
            handle = runner.launch(batch)
        rows, share = await handle, None
        if not kind.sees:
            gc.collect()
            MEMORY.peak = MEMORY.in_use
            await runner.launch(uneven_batch(runner, kind, budget))
            share = round((MEMORY.peak - before) / promised, 2)
        counts = LaunchCounts(
            launches=activity.launches,
            to_device_bytes=activity.to_device_bytes,
            to_host_bytes=activity.to_host_bytes,
            blocking_copies=len(activity.blocking_copies),
            synchronisations=len(activity.synchronisations),
            peak_share=share,
        )
        return Launched(activity, counts, rows)


def uneven_batch(runner: TransformerRunner, kind: Kind, budget: int) -> Batch:
    """Return the batch that the queue forms of one row as long as can be and as many short ones as fit beside it."""
    rows = BatchBudget(budget, free_padding=budget // FREE_PADDING_DIVISOR, pads=runner.facts.pads)
    lengths = []
    for length in chain([min(runner.params.max_tokens, budget)], repeat(SHORT)):
        if not rows.try_add(length):
            break
        lengths.append(length)
    prompts = [RenderedPrompt(np.ones(length, dtype=np.int32)) for length in lengths]
    return Batch(tuple(PoolingRequest(prompt, kind.params) for prompt in prompts))


async def record() -> None:
    """Write the record."""
    document: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as temporary, keeping_in(Path(temporary) / "kept"):
        for name, kind in KINDS.items():
            path = kind.write(Path(temporary) / name.replace(" ", "-"))
            batch = Batch(tuple(await kind.requests(kind.serve(path, fits=False, dtype="float32"))))
            document[name] = {way: attrs.asdict((await launch(kind, path, way, batch)).counts) for way in WAYS}
    RECORD.write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    trio.run(record)
