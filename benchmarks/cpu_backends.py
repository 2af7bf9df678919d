"""Measures how much faster OpenVINO computes each architecture than torch, and how near its output is.

Models have four layers of the size of their architecture's base model and random weights: nothing is downloaded. Each
is converted, compared and timed as at a server's start. MiniLM, which has real weights, is quantised as well.

python -m benchmarks.cpu_backends        # completes docs/cpu_backends.json; about 6 minutes for all
"""

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import cyclopts
import numpy as np
import torch
import transformers
from attrs import asdict, frozen
from transformers import logging as transformers_logging

from benchmarks.machine import describe_machine
from benchmarks.model import MODEL_PATH
from benchmarks.report import console, warn_if_busy
from trio_pool_serve.config import ModelConfig
from trio_pool_serve.models.folder import read_model_folder
from trio_pool_serve.models.loading.runner_loading import load_runner
from trio_pool_serve.runner.backbone import Backbone
from trio_pool_serve.runner.forward_pass import ForwardPass, PaddedCompute
from trio_pool_serve.runner.openvino.agreement import agreement, all_batches
from trio_pool_serve.runner.openvino.conversion import convert
from trio_pool_serve.runner.openvino.openvino_backbone import CompileParams, compile_model
from trio_pool_serve.runner.probe import probe_rows
from trio_pool_serve.threads.offload import Offload
from trio_pool_serve.types import PoolingRequest, RenderedPrompt

TARGET = Path(__file__).parents[1] / "docs" / "cpu_backends.json"

SHAPES = ((1, 32), (8, 32), (8, 128))
"""(rows, tokens) of the batches that are timed."""

MOST_ROUNDS, MOST_S = 5, 1.5

FEW = {"num_hidden_layers": 4}
"""Layers are alike: four are to torch's time and OpenVINO's what twelve are, and take a third of it."""

SMALL = {"hidden_size": 640, "num_hidden_layers": 4, "num_attention_heads": 8, "vocab_size": 32_000}
"""Decoders that are narrower than real ones, which take minutes."""


def _classifier(auto_class: str, config: Any) -> Callable[[], Backbone]:
    return lambda: Backbone(getattr(transformers, auto_class).from_config(config), "logits")


def _encoder(config: Any) -> Callable[[], Backbone]:
    return lambda: Backbone(transformers.AutoModel.from_config(config))


def _decoder(name: str, **more: Any) -> Callable[[], Backbone]:
    config = getattr(transformers, f"{name}Config")(
        **SMALL, intermediate_size=2560, num_key_value_heads=2, head_dim=80, use_cache=False, **more
    )
    return _encoder(config)


DEBERTA = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 256, "type_vocab_size": 0}

ARCHITECTURES: Mapping[tuple[str, str], Callable[[], Backbone]] = {
    ("BERT", "embedder, ColBERT"): _encoder(transformers.BertConfig(**FEW)),
    ("RoBERTa", "embedder"): _encoder(transformers.RobertaConfig(**FEW, max_position_embeddings=514)),
    ("XLM-RoBERTa", "embedder, BGE-M3"): _encoder(
        transformers.XLMRobertaConfig(**FEW, vocab_size=50_000, max_position_embeddings=514)
    ),
    ("MPNet", "embedder"): _encoder(transformers.MPNetConfig(**FEW, max_position_embeddings=514)),
    ("DistilBERT", "embedder"): _encoder(transformers.DistilBertConfig(n_layers=4)),
    ("ModernBERT", "embedder, late interaction"): _encoder(transformers.ModernBertConfig(**FEW)),
    ("T5 (encoder)", "embedder"): lambda: Backbone(
        transformers.T5EncoderModel(transformers.T5Config(d_model=768, d_ff=3072, num_layers=4, num_heads=12))
    ),
    ("Qwen3", "embedder, reranker"): _decoder("Qwen3"),
    ("Llama", "embedder"): _decoder("Llama"),
    ("Gemma 3 (bidirectional)", "embedder"): _decoder(
        "Gemma3Text", sliding_window=512, use_bidirectional_attention=True
    ),
    ("BERT", "sequence classifier, cross-encoder"): _classifier(
        "AutoModelForSequenceClassification", transformers.BertConfig(**FEW)
    ),
    ("BERT", "token classifier"): _classifier("AutoModelForTokenClassification", transformers.BertConfig(**FEW)),
    ("DeBERTa v3", "sequence classifier, cross-encoder"): _classifier(
        "AutoModelForSequenceClassification", transformers.DebertaV2Config(**FEW, vocab_size=50_000, **DEBERTA)
    ),
    ("BERT", "SPLADE"): _classifier("AutoModelForMaskedLM", transformers.BertConfig(**FEW)),
}


@frozen(kw_only=True)
class Row:
    """One line of the table: agreement, and seconds of torch divided by those of OpenVINO by shape."""

    architecture: str
    kind: str
    backend: str
    parameters: int
    cosine: float | None
    conversion_s: float | None = None
    speedups: list[float]
    failure: str = ""


@torch.inference_mode()
def speedups(ours: PaddedCompute, theirs: PaddedCompute, vocab_size: int) -> list[float]:
    """Return the time of ``theirs`` divided by that of ``ours``, for each shape; the best of some rounds in turns."""
    found = []
    for rows, tokens in SHAPES:
        requests = [PoolingRequest(RenderedPrompt(ids)) for ids in probe_rows(vocab_size, [tokens] * rows)]
        forward = ForwardPass(requests, torch.device("cpu"), 0)
        computations = (ours, theirs)
        for compute in computations:
            compute(forward)
        times: list[list[float]] = []
        began = time.perf_counter()
        while len(times) < 2 or (len(times) < MOST_ROUNDS and time.perf_counter() - began < MOST_S):
            times.append([])
            for compute in computations:
                compute(forward)  # the other computation's threads still spin for a while
                started = time.perf_counter()
                compute(forward)
                times[-1].append(time.perf_counter() - started)
        our_best, their_best = np.min(times, axis=0)
        found.append(round(float(their_best / our_best), 2))
    return found


def measure(architecture: str, kind: str, make: Callable[[], Backbone]) -> Row:
    """Convert, compare and time one model."""
    torch.manual_seed(0)
    backbone = make()
    backbone.model.eval()
    about = {"architecture": architecture, "kind": kind, "backend": "OpenVINO", "parameters": backbone.parameters}
    began = time.perf_counter()
    try:
        model = convert(backbone)
    except Exception as error:
        return Row(**about, cosine=None, speedups=[], failure=repr(error).splitlines()[0][:120])
    conversion_s = round(time.perf_counter() - began, 1)
    compiled = compile_model(backbone, model, CompileParams("f32", torch.get_num_threads()))
    cosine = agreement(compiled, backbone, all_batches(backbone, 512), pad_token_id=0).lowest
    found = speedups(compiled, backbone, backbone.vocab_size)
    return Row(**about, cosine=cosine, conversion_s=conversion_s, speedups=found)


def measure_minilm() -> list[Row]:
    """Return MiniLM's rows: in float32, and quantised."""
    rows = []
    for name, settings in (
        ("OpenVINO", {"backend": "openvino", "dtype": "float32"}),
        ("OpenVINO, int8", {"dtype": "int8"}),
    ):
        config = ModelConfig(device="cpu", cache_dir="", **settings)
        began = time.perf_counter()
        runner = load_runner(read_model_folder(Path(MODEL_PATH), config), config, Offload())
        runner.choose_computation()
        took = round(time.perf_counter() - began, 1)
        backbone = runner.backbone
        cosine = runner.cosine_with_float32 or (
            agreement(runner.compute, backbone, all_batches(backbone, 256), pad_token_id=0).lowest
        )
        rows.append(
            Row(
                architecture="BERT (all-MiniLM-L6-v2, real weights)",
                kind="embedder",
                backend=name,
                parameters=backbone.parameters,
                cosine=cosine,
                conversion_s=took,
                speedups=speedups(runner.compute, backbone, backbone.vocab_size),
            )
        )
    return rows


def write_record(*, output: Path = TARGET, anew: bool = False) -> None:
    """Measure every architecture that the record lacks, all of them with ``--anew``, and write the record."""
    transformers_logging.set_verbosity_error()
    machine = describe_machine()
    warn_if_busy(machine)
    record = json.loads(output.read_text()) if output.is_file() and not anew else {}
    rows: list[dict[str, Any]] = record.get("rows") or [asdict(row) for row in measure_minilm()]
    document = {"machine": machine, "threads": torch.get_num_threads(), "shapes": SHAPES, "rows": rows}
    measured = {(row["architecture"], row["kind"]) for row in rows}
    for (architecture, kind), make in ARCHITECTURES.items():
        if (architecture, kind) not in measured:
            rows.append(asdict(measure(architecture, kind, make)))
            console.print(rows[-1])
        output.write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    cyclopts.run(write_record)
