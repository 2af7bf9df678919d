"""How long does a launch keep the host, and with it the interpreter lock? CUDA's driver comes on top.

A BERT of twelve layers, so narrow that its kernels take next to no time, on CPU: what is left is Python and torch's
dispatcher, which a GPU's launch takes as well. Packed launches are measured for one short row only, as their kernels
are the same for any batch; of graphs, whose replay does nothing here, for batches of all shapes.

    python -m benchmarks.launch_time
"""

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cyclopts
import numpy as np
import torch
from attrs import evolve, frozen
from cyclopts import Parameter
from torch import Tensor

from benchmarks.bert_shapes import write_bert
from benchmarks.report import RESULTS, Report, open_steps, print_table
from benchmarks.rounds import Rounds
from trio_pool_serve.config import ModelConfig
from trio_pool_serve.models.folder import read_model_folder
from trio_pool_serve.models.loading.torch_loading import load_unfitted
from trio_pool_serve.runner.cuda.graphs import GraphedBackbone, shapes_to_capture
from trio_pool_serve.runner.cuda.packed_backbone import PackedBackbone
from trio_pool_serve.runner.forward_pass import Compute
from trio_pool_serve.runner.transformer_runner import TransformerRunner
from trio_pool_serve.threads.offload import Offload
from trio_pool_serve.types import Batch, PoolingRequest, RenderedPrompt

SHAPES = ((1, 32), (64, 32), (32, 512), (328, 50))
"""Rows and tokens of each; the last has 16,400 tokens: a full batch, as rows are whole."""

BATCH_TOKENS = 16_400


@Parameter(name="*")
@frozen(kw_only=True)
class Settings:
    """The settings: ``repeats`` launches of each shape in each round."""

    rounds: int = 5
    repeats: int = 20
    output_dir: Path = RESULTS


@frozen
class Cost:
    """Processor time of a launch, ms."""

    launch_ms: float


class NoGraphs:
    """Captures nothing: a replay takes no time."""

    def capture(self, compute: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], Any]]:
        """Return the output's memory, and a replay that does nothing."""
        return compute(), lambda: None


def make_runner(folder: Path) -> tuple[TransformerRunner, dict[str, Compute]]:
    """Load a model, and return it with the ways to compute it."""
    config = ModelConfig(device="cpu", dtype="float32", backend="torch")
    runner = load_unfitted(read_model_folder(folder, config), config, Offload())()
    packed = PackedBackbone(runner.loaded.backbone, runner.params.pad_token_id)
    graphed = GraphedBackbone(packed, NoGraphs(), runner.params.device)
    parameters = 86_000_000  # of BERT-base, without its embeddings
    shapes = shapes_to_capture(
        parameters=parameters, max_tokens=runner.params.max_tokens, max_batch_tokens=BATCH_TOKENS
    )
    graphed.capture(shapes)
    return runner, {"packed": packed, "graphed": graphed}


def batch_of(rows: int, tokens: int) -> Batch:
    """Return rows of random ids."""
    random = np.random.default_rng(rows)
    ids = random.integers(1000, 30000, size=(rows, tokens)).astype(np.int32)
    return Batch(tuple(PoolingRequest(RenderedPrompt(row)) for row in ids))


def measure(runner: TransformerRunner, batch: Batch, repeats: int) -> Cost:
    """Return the cost of one launch of a batch."""
    runner.launch(batch)
    began = time.process_time()
    for _ in range(repeats):
        runner.launch(batch)
    return Cost(1e3 * (time.process_time() - began) / repeats)


def main(settings: Settings = Settings()) -> None:
    """Compare the ways, by the batch's shape."""
    torch.set_num_threads(1)
    report = Report("launch_time", settings)
    rounds: Rounds[tuple[str, int, int]] = Rounds()
    with (
        tempfile.TemporaryDirectory() as temporary,
        open_steps("launches", settings.rounds + 1) as step,
    ):
        step("loading")
        runner, ways = make_runner(write_bert(Path(temporary) / "bert", "narrow"))
        for number in range(settings.rounds):
            step(f"round {number + 1}")
            for rows, tokens in SHAPES:
                batch = batch_of(rows, tokens)
                for name, compute in ways.items():
                    if name == "graphed" or rows == 1:
                        computing = evolve(runner, compute=compute)
                        rounds.add((name, rows, tokens), measure(computing, batch, settings.repeats))
    table = [
        [name, f"{rows} × {tokens}", f"{rounds.median((name, rows, tokens), 'launch_ms'):.2f}"]
        for name, rows, tokens in rounds.results
    ]
    print_table("Processor time of a launch", ["way", "rows × tokens", "ms"], sorted(table, reverse=True))
    report.write(ways=rounds.as_document("way", "rows", "tokens"))


if __name__ == "__main__":
    cyclopts.run(main)
