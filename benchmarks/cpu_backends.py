"""Measures how much faster OpenVINO computes each architecture than torch, and how near its output is.

Models have four layers of the size of their architecture's base model and random weights: nothing is downloaded. Each
is converted, compared and timed as at a server's start. MiniLM, which has real weights, is quantised as well.

python -m benchmarks.cpu_backends        # completes docs/cpu_backends.json; about 6 minutes for all
"""

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
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
from trio_pool_serve.models.loading.runner_loader import load_transformer
from trio_pool_serve.models.loading.torch_loading import load_unfitted
from trio_pool_serve.runner.comparison import probe_rows
from trio_pool_serve.runner.heads.classification import (
    ClassificationHead,
    TokenClassificationHead,
    activation_functions,
    identity,
)
from trio_pool_serve.runner.heads.embedding import EmbeddingHead
from trio_pool_serve.runner.heads.pooling import Pooler
from trio_pool_serve.runner.heads.sparse import SpladeHead
from trio_pool_serve.runner.loaded_model import Backbone, LoadedModel, LoadingParams
from trio_pool_serve.runner.openvino.converted_model import COMPARED, UnusableGraphError
from trio_pool_serve.runner.openvino.openvino_runner import OpenVinoRunner
from trio_pool_serve.runner.openvino.preparation import Preparation, agreement, all_batches
from trio_pool_serve.runner.openvino.programs import CompileParams
from trio_pool_serve.runner.transformer_runner import TransformerRunner
from trio_pool_serve.threads.offload import Offload
from trio_pool_serve.types import (
    Batch,
    Classify,
    Embed,
    PoolingParams,
    PoolingRequest,
    RenderedPrompt,
    Runner,
    RunnerFacts,
    RunnerParams,
    SparseEmbed,
    TokenClassify,
)

TARGET = Path(__file__).parents[1] / "docs" / "cpu_backends.json"

SHAPES = ((1, 32), (8, 32), (8, 128))
"""(rows, tokens) of the batches that are timed."""

MOST_ROUNDS, MOST_S = 5, 1.5

FEW = {"num_hidden_layers": 4}
"""Layers are alike: four are to torch's time and OpenVINO's what twelve are, and take a third of it."""

SMALL = {"hidden_size": 640, "num_hidden_layers": 4, "num_attention_heads": 8, "vocab_size": 32_000}
"""Decoders that are narrower than real ones, which take minutes."""


HEADS: Mapping[str, Callable[[], Mapping[type[Any], Any]]] = {
    "AutoModel": lambda: {Embed: EmbeddingHead(Pooler(["mean"], []))},
    "AutoModelForSequenceClassification": lambda: {Classify: ClassificationHead("first", identity, LABELS)},
    "AutoModelForTokenClassification": lambda: {TokenClassify: TokenClassificationHead(identity, LABELS)},
    "AutoModelForMaskedLM": lambda: {SparseEmbed: SpladeHead()},
}
LABELS = activation_functions(
    {"probabilities": "torch.nn.Softmax", "score": "torch.nn.Sigmoid", "raw": "torch.nn.Identity"}
)


def _model(make: Callable[[], Any], auto_class: str = "AutoModel") -> Callable[[], LoadedModel]:
    output = "last_hidden_state" if auto_class == "AutoModel" else "logits"
    return lambda: LoadedModel(backbone=Backbone(make(), output), heads=HEADS[auto_class](), description="")


def _classifier(auto_class: str, config: Any) -> Callable[[], LoadedModel]:
    return _model(lambda: getattr(transformers, auto_class).from_config(config), auto_class)


def _encoder(config: Any) -> Callable[[], LoadedModel]:
    return _model(lambda: transformers.AutoModel.from_config(config))


def _decoder(name: str, **more: Any) -> Callable[[], LoadedModel]:
    config = getattr(transformers, f"{name}Config")(
        **SMALL, intermediate_size=2560, num_key_value_heads=2, head_dim=80, use_cache=False, **more
    )
    return _encoder(config)


DEBERTA = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 256, "type_vocab_size": 0}

ARCHITECTURES: Mapping[tuple[str, str], Callable[[], LoadedModel]] = {
    ("BERT", "embedder, ColBERT"): _encoder(transformers.BertConfig(**FEW)),
    ("RoBERTa", "embedder"): _encoder(transformers.RobertaConfig(**FEW, max_position_embeddings=514)),
    ("XLM-RoBERTa", "embedder, BGE-M3"): _encoder(
        transformers.XLMRobertaConfig(**FEW, vocab_size=50_000, max_position_embeddings=514)
    ),
    ("MPNet", "embedder"): _encoder(transformers.MPNetConfig(**FEW, max_position_embeddings=514)),
    ("DistilBERT", "embedder"): _encoder(transformers.DistilBertConfig(n_layers=4)),
    ("ModernBERT", "embedder, late interaction"): _encoder(transformers.ModernBertConfig(**FEW)),
    ("T5 (encoder)", "embedder"): _model(
        lambda: transformers.T5EncoderModel(transformers.T5Config(d_model=768, d_ff=3072, num_layers=4, num_heads=12))
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


def speedups(ours: Runner, theirs: TransformerRunner, params: PoolingParams) -> list[float]:
    """Return the time of ``theirs`` divided by that of ``ours``, for each shape; the best of some rounds in turns."""
    found = []
    for rows, tokens in SHAPES:
        prompts = [RenderedPrompt(ids) for ids in probe_rows(theirs.loaded.backbone.vocab_size, [tokens] * rows)]
        batch = Batch(tuple([PoolingRequest(prompt, (params,)) for prompt in prompts]))
        computations = (ours.launch, theirs.launch)
        for compute in computations:
            compute(batch)
        times: list[list[float]] = []
        began = time.perf_counter()
        while len(times) < 2 or (len(times) < MOST_ROUNDS and time.perf_counter() - began < MOST_S):
            times.append([])
            for compute in computations:
                compute(batch)  # the other computation's threads still spin for a while
                started = time.perf_counter()
                compute(batch)
                times[-1].append(time.perf_counter() - started)
        our_best, their_best = np.min(times, axis=0)
        found.append(round(float(their_best / our_best), 2))
    return found


def measure(architecture: str, kind: str, make: Callable[[], LoadedModel]) -> Row:
    """Convert, compare and time one model."""
    torch.manual_seed(0)
    loaded = make()
    loaded.backbone.model.eval()
    params = LoadingParams(device=torch.device("cpu"), dtype=torch.float32, pad_token_id=0, max_tokens=512)
    by_torch = TransformerRunner(loaded, params, RunnerFacts(max_batch_tokens=2048, device="cpu"))
    about = {
        "architecture": architecture,
        "kind": kind,
        "backend": "OpenVINO",
        "parameters": loaded.backbone.parameters,
    }
    (wanted,) = [params for params in COMPARED if type(params) in loaded.heads]
    with TemporaryDirectory() as folder:
        began = time.perf_counter()
        try:
            model = Preparation(by_torch, ModelConfig(backend="openvino")).convert(Path(folder))
        except UnusableGraphError as refusal:
            return Row(**about, cosine=None, speedups=[], failure=str(refusal)[:120])
        conversion_s = round(time.perf_counter() - began, 1)
        ours = OpenVinoRunner.of_folder(Path(folder), model, CompileParams("f32", torch.get_num_threads()))
        cosine = float(agreement(ours, by_torch, all_batches(loaded.backbone, 512)).min())
        found = speedups(ours, by_torch, wanted)
    return Row(**about, cosine=cosine, conversion_s=conversion_s, speedups=found)


def measure_minilm() -> list[Row]:
    """Return MiniLM's rows: in float32, and quantised."""
    rows = []
    exact = ModelConfig(device="cpu", dtype="float32", backend="torch")
    by_torch = load_unfitted(read_model_folder(Path(MODEL_PATH), exact), exact, Offload())()
    backbone, params = by_torch.loaded.backbone, Embed(normalize=False)
    for name, settings in (
        ("OpenVINO", {"backend": "openvino", "dtype": "float32"}),
        ("OpenVINO, int8", {"dtype": "int8"}),
    ):
        config = ModelConfig(device="cpu", cache_dir="", **settings)
        began = time.perf_counter()
        runner = load_transformer(read_model_folder(Path(MODEL_PATH), config), config, Offload())(RunnerParams())
        took = round(time.perf_counter() - began, 1)
        cosine = runner.facts.cosine_with_float32 or float(
            agreement(runner, by_torch, all_batches(backbone, 256)).min()
        )
        rows.append(
            Row(
                architecture="BERT (all-MiniLM-L6-v2, real weights)",
                kind="embedder",
                backend=name,
                parameters=backbone.parameters,
                cosine=cosine,
                conversion_s=took,
                speedups=speedups(runner, by_torch, params),
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
