"""Files in OpenVINO's format and in ONNX, as Optimum writes them, in place of weights that torch loads."""

import logging
import subprocess
import sys
import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.onnx._internal.torchscript_exporter import onnx_proto_utils

from tests.lanes import sampled
from tests.models.classifier_families import POOLED, write_classifier
from tests.models.model_families import LAYOUTS, TEXTS, ServedModel, pooling, write_family
from tests.models.test_openvino_agreement import TOLERANCE, difference, prompts_of
from trio_pool_serve.errors import ModelLoadError
from trio_pool_serve.prompts import TextPrompt
from trio_pool_serve.runner.batch_rows import ONE_LENGTH
from trio_pool_serve.runner.transformer_masks import traceable_masks
from trio_pool_serve.types import Classify, Embed, PoolingParams, TokenClassify, TokenEmbed

ov = pytest.importorskip("openvino")
nncf = pytest.importorskip("nncf")

EXACT = {"backend": "openvino", "cache_dir": ""}
AUTO_CLASSES = {
    "last_hidden_state": "AutoModel",
    "logits": "AutoModelForSequenceClassification",
    "token_logits": "AutoModelForTokenClassification",
}


OPENVINO, ONNX = "openvino/openvino_model.xml", "onnx/model.onnx"


class Exported(nn.Module):
    """A model with the inputs and the output that an exported file has."""

    def __init__(self, model: Any, names: Sequence[str], output: str, *, reads_mask: bool) -> None:
        super().__init__()
        self.model, self.names, self.output, self.reads_mask = model, names, output, reads_mask

    def forward(self, *inputs: Tensor) -> Tensor:
        given = dict(zip(self.names, inputs, strict=True))
        if not self.reads_mask:
            given["attention_mask"] = given["attention_mask"] * 0 + 1
        return getattr(self.model(**given), self.output)


def export(
    folder: Path, file: str, kind: str = "last_hidden_state", more: str = "token_type_ids", *, reads_mask: bool = True
) -> Path:
    """Write a folder's model to a file of it, in the format of its suffix; ``more`` is a third input, or none."""
    model = getattr(transformers, AUTO_CLASSES[kind]).from_pretrained(folder, attn_implementation="eager").eval()
    model.config.use_cache = False
    names = [name for name in ("input_ids", "attention_mask", more) if name]
    output = kind.removeprefix("token_")
    exported = Exported(model, names, output, reads_mask=reads_mask).eval()
    ids = torch.arange(3, 17).view(2, 7)
    mask = torch.ones_like(ids)
    mask[1, 4:] = 0
    example = (ids, mask, torch.zeros_like(ids))[: len(names)]
    path = folder / file
    path.parent.mkdir(exist_ok=True)
    with warnings.catch_warnings(), traceable_masks(model):
        warnings.simplefilter("ignore")  # of tracing
        _write(path, exported, example, names, output)
    return path


def _write(path: Path, exported: Exported, example: Any, names: Sequence[str], output: str) -> None:
    if path.suffix == ".xml":
        graph = ov.convert_model(exported, example_input=example, input=[([-1, -1], ov.Type.i64)] * len(names))
        for name, given in zip(names, graph.inputs, strict=True):
            given.get_tensor().set_names({name})
        graph.outputs[0].get_tensor().set_names({output})
        ov.save_model(graph, path, compress_to_fp16=False)
        return
    with pytest.MonkeyPatch.context() as patch:
        # It would add functions of onnxscript, of which there are none, and import onnx for that.
        patch.setattr(onnx_proto_utils, "_add_onnxscript_fn", lambda model_bytes, _: model_bytes)
        axes = {name: {0: "batch", 1: "sequence"} for name in (*names, output)}
        torch.onnx.export(
            exported, example, path, dynamo=False, input_names=names, output_names=[output], dynamic_axes=axes
        )


async def assert_same(ours: ServedModel, by_torch: ServedModel, *kinds: type[PoolingParams]) -> None:
    for params in (kind() for kind in kinds):
        for prompts in prompts_of(by_torch, params):
            expected = await by_torch.compute(prompts, params)
            for together in (True, False):
                computed = await ours.compute(prompts, params, together=together)
                assert max(map(difference, computed, expected)) < TOLERANCE


STATES, TYPES = "last_hidden_state", "token_type_ids"
CASES = {
    "bert": (partial(write_family, name="bert"), STATES, TYPES, (Embed, TokenEmbed)),
    "distilbert": (partial(write_family, name="distilbert"), STATES, "", (Embed, TokenEmbed)),
    "several poolings": (
        partial(write_family, name="mpnet", modules=(pooling(["max", "weightedmean"]),)), STATES, "", (Embed,),
    ),
    "decoder": (partial(write_family, name="qwen3"), STATES, "", (Embed,)),
    "cross-encoder": (partial(write_classifier, name="deberta-v2", num_labels=1), "logits", "", (Classify,)),
    "classifier": (partial(write_classifier, name="distilbert", num_labels=3), "logits", "", (Classify,)),
    "token classifier": (
        partial(write_classifier, name="bert", head="TokenClassification", num_labels=3), "token_logits", TYPES,
        (TokenClassify,),
    ),
}  # fmt: skip


@sampled(("name", "file"), [(name, file) for name in CASES for file in (OPENVINO, ONNX)], keep=[("bert", OPENVINO)])
async def test_an_exported_file_gives_what_torch_gives_with_and_without_weights_for_torch(
    name: str, file: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.INFO)
    write, kind, more, kinds = CASES[name]
    folder = write(tmp_path / "model")
    by_torch = ServedModel(folder)
    export(folder, file, kind, more)
    compared = ServedModel(folder, settings=EXACT)
    assert str(compared.runner.facts).endswith(f"by OpenVINO from {file}")
    await assert_same(compared, by_torch, *kinds)
    (folder / "model.safetensors").unlink()
    alone = ServedModel(folder, settings=EXACT)
    assert str(alone.runner.facts).endswith(f"by OpenVINO from {file}, not compared with torch")
    assert "as the folder contains no weights for torch" in caplog.text
    assert alone.runner.facts.dimensions == compared.runner.facts.dimensions
    await assert_same(alone, by_torch, *kinds)


@pytest.mark.slow
async def test_a_cross_encoder_s_file_has_no_numbers_of_tokens(tmp_path: Path):
    folder = write_classifier(tmp_path / "model", "bert", num_labels=1)
    by_torch = ServedModel(folder)
    export(folder, OPENVINO, "logits")
    assert "token_classify" in ServedModel(folder, settings=EXACT).folder.spec.tasks
    (folder / "model.safetensors").unlink()
    alone = ServedModel(folder, settings=EXACT)
    assert "token_classify" not in alone.folder.spec.tasks
    await assert_same(alone, by_torch, Classify)


@pytest.mark.parametrize("write", [LAYOUTS["bert_with_weighted_layers"], POOLED["bert_with_pooled_labels"]])
def test_without_weights_for_torch_modules_that_only_torch_computes_are_refused(tmp_path: Path, write: Any):
    folder = write(tmp_path / "model")
    export(folder, OPENVINO)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelLoadError, match=r"(Pooling|Dense) .*requires torch"):
        ServedModel(folder, settings=EXACT)


def write_other_weights(folder: Path) -> None:
    export(folder, OPENVINO)
    model = transformers.AutoModel.from_pretrained(folder)
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(1.5)
    model.save_pretrained(folder)


@sampled(
    ("spoil", "reason"),
    [
        (write_other_weights, "OpenVINO's output differs: cosine 0."),
        (lambda folder: export(folder, OPENVINO, more="position_ids"), "its inputs are input_ids, attention_mask, pos"),
        (lambda folder: export(folder, OPENVINO, more=""), "OpenVINO's output differs: cosine 0."),
        (lambda folder: export(folder, OPENVINO).write_text("<net"), "OpenVINO fails: RuntimeError"),
    ],
    keep=[],
)
def test_a_file_that_does_not_agree_is_not_taken_and_the_log_says_why(
    spoil: Any, reason: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.INFO)
    folder = write_family(tmp_path / "bert", "bert")
    spoil(folder)
    served = ServedModel(folder, settings=EXACT)
    assert str(served.runner.facts).endswith("by OpenVINO")
    assert f"not from {OPENVINO}: {reason}" in caplog.text
    assert served.runner.model.origin in caplog.text


@sampled(
    ("write", "options", "reason"),
    [
        (partial(write_family, name="xlm-roberta"), {"more": ""}, "Pooling . Dense requires torch"),
        (partial(write_classifier, name="distilbert", num_labels=3), {"more": ""}, "it has no output logits"),
    ],
    keep=[],
)
def test_without_weights_for_torch_an_unusable_file_is_an_error_that_says_what_to_do(
    write: Any, options: Any, reason: str, tmp_path: Path
):
    export(write(tmp_path / "model"), OPENVINO, **options)
    (tmp_path / "model" / "model.safetensors").unlink()
    with pytest.raises(ModelLoadError, match=reason) as caught:
        ServedModel(tmp_path / "model", settings=EXACT)
    assert "pip install torch transformers" in str(caught.value)
    assert "trio-pool-serve convert" in str(caught.value)


async def test_rows_of_a_file_that_does_not_mask_padding_are_computed_with_rows_of_their_length(tmp_path: Path):
    folder = write_family(tmp_path / "bert", "bert")
    texts = [text for text in TEXTS if text]
    expected = await ServedModel(folder).embed(texts)
    export(folder, OPENVINO, reads_mask=False)
    (folder / "model.safetensors").unlink()
    served = ServedModel(folder, settings=EXACT)
    assert ONE_LENGTH in str(served.runner.facts)
    assert max(map(difference, await served.embed(texts), expected)) < TOLERANCE


def test_int8_without_its_extra_is_refused_before_anything_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "nncf", None)
    folder = write_family(tmp_path / "bert", "bert")
    (folder / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(ModelLoadError, match=r"Install the extra `int8`: pip install 'trio-pool-serve\[int8\]'"):
        ServedModel(folder, dtype="int8", settings=EXACT)


@pytest.mark.slow
async def test_int8_without_weights_for_torch_is_computed_from_the_file_in_int8(tmp_path: Path):
    folder = write_family(tmp_path / "bert", "bert")
    by_torch = ServedModel(folder)
    graph = ov.Core().read_model(export(folder, OPENVINO))
    graph = nncf.compress_weights(graph, mode=nncf.CompressWeightsMode.INT8_ASYM)
    ov.save_model(graph, folder / "openvino" / "openvino_model_qint8_quantized.xml")
    (folder / "model.safetensors").unlink()
    ours = ServedModel(folder, dtype="int8", settings=EXACT)
    assert "int8 on cpu" in str(ours.runner.facts)
    assert "openvino_model_qint8_quantized.xml" in str(ours.runner.facts)
    expected = await by_torch.compute([TextPrompt(text) for text in TEXTS], Embed())
    computed = await ours.compute([TextPrompt(text) for text in TEXTS], Embed())
    differences = [difference(*pair) for pair in zip(computed, expected, strict=True)]
    assert 1e-4 < max(differences) < 0.05


@pytest.mark.slow
def test_an_exported_file_that_is_replaced_is_converted_anew(tmp_path: Path):
    folder = write_family(tmp_path / "bert", "bert")
    settings = {**EXACT, "cache_dir": str(tmp_path / "cache")}
    weights = (folder / "model.safetensors").read_bytes()
    export(folder, OPENVINO)
    (folder / "model.safetensors").unlink()
    first, second = [ServedModel(folder, settings=settings).runner.facts.computed_by.fingerprint for _ in range(2)]
    assert len([*(tmp_path / "cache").glob("*/record.json")]) == 1
    assert first == second
    (folder / "model.safetensors").write_bytes(weights)
    write_other_weights(folder)
    export(folder, OPENVINO)
    (folder / "model.safetensors").unlink()
    assert ServedModel(folder, settings=settings).runner.facts.computed_by.fingerprint != first
    assert len([*(tmp_path / "cache").glob("*/record.json")]) == 2


WITHOUT_TORCH = """
import sys
sys.modules["torch"] = sys.modules["transformers"] = None
from importlib.machinery import PathFinder
find = PathFinder.find_spec
hidden = ("torch", "transformers")
PathFinder.find_spec = lambda name, *rest: None if name in hidden else find(name, *rest)
import logging
from pathlib import Path
import numpy as np
from trio_pool_serve.config import ModelConfig
from trio_pool_serve.errors import ModelLoadError
from trio_pool_serve.models.folder import read_model_folder
from trio_pool_serve.models.loading.runner_loader import load_transformer
from trio_pool_serve.types import RunnerParams
from trio_pool_serve.threads.offload import Offload
from trio_pool_serve.types import Batch, Embed, PoolingRequest, RenderedPrompt

logging.basicConfig(level=logging.INFO)
path, cache, backend = sys.argv[1:]
config = ModelConfig(device="cpu", dtype="float32", cache_dir=cache, backend=backend)
try:
    runner = load_transformer(read_model_folder(Path(path), config), config, Offload())(RunnerParams())
except ModelLoadError as error:
    sys.exit(str(error))
rows = Batch((PoolingRequest(RenderedPrompt(np.array([2, 9, 8, 7, 3], np.int32)), (Embed(),)),))
print(runner.facts)
print(runner.launch(rows).rows[0][0].tolist())
"""


def without_torch(folder: Path, cache: Path | str, backend: str = "auto") -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-c", WITHOUT_TORCH, str(folder), str(cache), backend]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@pytest.mark.slow
def test_without_torch_a_converted_model_and_an_exported_file_are_computed_and_others_are_errors(tmp_path: Path):
    folder, cache = write_family(tmp_path / "bert", "bert"), tmp_path / "cache"
    refused = without_torch(folder, cache)
    assert refused.returncode == 1
    assert "not been converted to float32 yet, and torch and transformers cannot be imported" in refused.stderr
    assert f"`trio-pool-serve convert {folder}`" in refused.stderr
    by_torch = without_torch(folder, cache, "torch")
    assert by_torch.returncode == 1
    assert "Only torch can compute this model here (as configured), but torch and transformers" in by_torch.stderr
    ServedModel(folder, settings={"backend": "openvino", "cache_dir": str(cache)})
    cached = without_torch(folder, cache)
    assert cached.returncode == 0, cached.stderr
    export(folder, OPENVINO)
    taken = without_torch(folder, tmp_path / "other")
    assert taken.returncode == 0, taken.stderr
    assert "not compared with torch, as torch and transformers cannot be imported" in taken.stderr
    described, values = taken.stdout.splitlines()
    assert described.endswith(f"by OpenVINO from {OPENVINO}, not compared with torch")
    expected = cached.stdout.splitlines()[1]
    assert np.allclose(*(np.fromstring(row.strip("[]"), sep=",") for row in (values, expected)), atol=TOLERANCE)
