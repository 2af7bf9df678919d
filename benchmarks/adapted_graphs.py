"""What does a LoRA adapter cost by OpenVINO? Batches of the packaged model with and without one, and of a merged model.

The adapters have random weights. The three computations are timed in turns, and the best time of each counts.

    python -m benchmarks.adapted_graphs
"""

import tempfile
import time
from pathlib import Path
from typing import Any

import cyclopts
import numpy as np
from attrs import frozen
from cyclopts import Parameter
from msgspec.structs import replace

from benchmarks.adapters import LAYERS, write_adapter
from benchmarks.model import MODEL_PATH
from benchmarks.report import RESULTS, Report, command_of, print_table
from trio_pool_serve.config import ModelConfig
from trio_pool_serve.models.files.adapter_files import read_adapter
from trio_pool_serve.models.folder import locate_model, read_model_folder
from trio_pool_serve.models.loading.conversion_process import load_to_convert
from trio_pool_serve.models.loading.openvino_loading import CpuModel
from trio_pool_serve.models.loading.runner_loader import load_by_torch
from trio_pool_serve.threads.offload import Offload
from trio_pool_serve.types import Adapter, Batch, Embed, PoolingRequest, RenderedPrompt, RunnerParams

SHAPES = ((1, 16), (1, 64), (8, 32), (16, 128))
"""Rows and tokens of batches."""


@Parameter(name="*")
@frozen(kw_only=True)
class Settings:
    """The settings: ``rounds`` of each computation; computations of fewer than 512 tokens have more."""

    rounds: int = 30
    rank: int = 16
    output_dir: Path = RESULTS


def runner_of(folder: str, dtype: Any) -> Any:
    """Return OpenVINO's runner of a model, or of an adapter that is merged into the packaged model."""
    base = None if folder == MODEL_PATH else MODEL_PATH
    config = ModelConfig(device="cpu", backend="openvino", dtype=dtype, cache_dir="", adapter_base=base)
    found = read_model_folder(locate_model(folder, config))
    return CpuModel(found, config, Offload(), load_by_torch, load_to_convert).open()(RunnerParams())


def batch_of(rows: int, tokens: int, adapter: Adapter | None = None) -> Batch:
    """Return a batch of random tokens."""
    ids = np.random.default_rng(0).integers(1000, 20_000, (rows, tokens)).astype(np.int32)
    requests = [PoolingRequest(RenderedPrompt(row), (Embed(),)) for row in ids]
    return Batch(tuple(replace(request, adapter=adapter) for request in requests))


async def run(settings: Settings) -> None:
    """Measure and report. Cancellation: not before the end."""
    report, lines = Report("adapted_graphs", settings), []
    with tempfile.TemporaryDirectory() as temporary:
        for dtype in ("float32", "bfloat16"):
            base = runner_of(MODEL_PATH, dtype)
            for layers in (("query", "value"), LAYERS):
                folder = Path(temporary) / f"{dtype}-{len(layers)}"
                write_adapter(folder, settings.rank, 0, layers)
                adapter, merged = Adapter(str(folder), read_adapter(folder).digest), runner_of(str(folder), dtype)
                for rows, tokens in SHAPES:
                    plain, adapted = batch_of(rows, tokens), batch_of(rows, tokens, adapter)
                    computed = {"base": (base, plain), "merged": (merged, plain), "adapter": (base, adapted)}
                    best = dict.fromkeys(computed, float("inf"))
                    for _ in range(settings.rounds * max(1, 512 // (rows * tokens))):
                        for name, (runner, batch) in computed.items():
                            began = time.perf_counter()
                            runner.launch(batch)
                            best[name] = min(best[name], time.perf_counter() - began)
                    ratios = [best[name] / best["base"] for name in ("merged", "adapter")]
                    lines.append([dtype, ", ".join(layers), f"{rows} x {tokens}", *(f"{each:.2f}" for each in ratios)])
    print_table(
        f"time as a part of the base's, rank {settings.rank}", ["dtype", "layers", "batch", "merged", "adapter"], lines
    )
    report.write(lines=lines)


main = command_of(run)


if __name__ == "__main__":
    cyclopts.run(main)
