"""A LoRA adapter's folder is served merged into its base, without peft; one that does not fit is refused."""

import json
import os
import shutil
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from tests.model_folders import write_json
from tests.models.adapter_folders import factors, randomise, write_adapter
from tests.models.classifier_families import PAIRS, PROMPTS, padded_qwen3_tokenizer
from tests.models.model_families import (
    TEXTS,
    ServedModel,
    edit_json,
    edit_weights,
    largest_difference,
    qwen3_tokenizer,
    reference,
    refuse,
    write_family,
    write_model,
)
from tests.models.static_families import STATIC
from trio_pool_serve.config import ModelConfig
from trio_pool_serve.errors import ModelLoadError
from trio_pool_serve.models.files.model_digest import digest_of
from trio_pool_serve.models.folder import locate_model
from trio_pool_serve.models.loading.adapter_merging import renaming_to
from trio_pool_serve.types import Classify

QUERY = "encoder.layer.0.attention.self.query"
TOLERANCE = 1e-5


def write_by_peft(folder: Path, base: Path, auto_class: str, **config: Any) -> Any:
    """Write an adapter as PEFT does, two files alone; return PEFT's model."""
    import peft
    import transformers

    labels = {"num_labels": 3} if config.get("task_type") == "SEQ_CLS" else {}
    model = getattr(transformers, auto_class).from_pretrained(base, **labels)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*is_gradient_checkpointing", FutureWarning)  # peft asks transformers for it
        warnings.filterwarnings("ignore", "Setting `save_embedding_layers`", UserWarning)
        adapted: Any = peft.get_peft_model(model, peft.LoraConfig(r=4, lora_alpha=8, **config))
        randomise(adapted)
        adapted.save_pretrained(folder)
    assert {path.name for path in folder.iterdir()} <= {"adapter_config.json", "adapter_model.safetensors", "README.md"}
    return adapted.eval()


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return write_family(tmp_path / "base", "bert")


@pytest.fixture
def adapter(tmp_path: Path, base: Path) -> Path:
    """An adapter of ``base``, two files alone."""
    tensors = factors(QUERY, size=32) | {f"base_model.model.{QUERY}.lora_B.weight": np.ones((32, 2), np.float32)}
    return write_adapter(
        tmp_path / "adapter",
        tensors,
        base_model_name_or_path=str(base),
        target_modules=["layer.0.attention.self.query"],
    )


async def test_the_base_has_what_an_adapter_by_peft_lacks(tmp_path: Path, base: Path, record_agreement: Any):
    by_peft = write_by_peft(tmp_path / "adapter", base, "AutoModel", target_modules=["query"])
    theirs = reference(base)
    before = theirs.encode(list(TEXTS), prompt_name="query")
    theirs[0].model = by_peft
    expected = theirs.encode(list(TEXTS), prompt_name="query")
    assert np.abs(expected - before).max() > 0.1
    ours = ServedModel(tmp_path / "adapter")
    differs = largest_difference(await ours.embed(TEXTS, instruction=ours.folder.prompts["query"]), expected)
    assert differs < TOLERANCE
    record_agreement("LoRA by PEFT on bert", "embed", "peft", differs)


async def test_a_folder_with_its_base_s_weights_is_served_with_the_adapter_and_without_peft(
    tmp_path: Path, base: Path, adapter: Path, monkeypatch: pytest.MonkeyPatch
):
    expected = await ServedModel(adapter).embed(TEXTS)
    assert largest_difference(expected, await ServedModel(base).embed(TEXTS)) > 0.1
    whole = shutil.copytree(base, tmp_path / "whole")
    shutil.copytree(adapter, whole, dirs_exist_ok=True)
    edit_json(whole / "adapter_config.json", lambda config: config.update(base_model_name_or_path="no/such-model"))
    monkeypatch.setitem(sys.modules, "peft", None)  # importing it is an error
    assert largest_difference(await ServedModel(whole).embed(TEXTS), expected) == 0


async def test_an_adapter_makes_a_classifier_of_a_bare_base(tmp_path: Path, record_agreement: Any):
    tokenizer = padded_qwen3_tokenizer()
    base = write_model(tmp_path / "base", "Qwen3Model", tokenizer, pad_token_id=tokenizer.pad_token_id)
    by_peft = write_by_peft(
        tmp_path / "adapter", base, "AutoModelForSequenceClassification", target_modules=["q_proj"], task_type="SEQ_CLS"
    )
    ours = ServedModel(tmp_path / "adapter")
    assert ours.folder.spec.labels == ("LABEL_0", "LABEL_1", "LABEL_2")
    rows = await ours.compute(PROMPTS, Classify("raw"))
    first, second = zip(*PAIRS, strict=True)
    cut = {"truncation": "longest_first", "max_length": ours.folder.max_model_len, "padding": True}
    with torch.no_grad():
        expected = by_peft(**tokenizer(list(first), list(second), return_tensors="pt", **cut)).logits.numpy()
    differs = largest_difference(rows, expected)
    assert differs < TOLERANCE
    record_agreement("LoRA by PEFT on qwen3", "classify", "peft", differs)


async def test_an_adapter_of_a_language_model_is_served_for_embeddings(tmp_path: Path):
    base = write_model(tmp_path / "base", "Qwen3ForCausalLM", qwen3_tokenizer())
    targets = {"target_modules": ["q_proj", "lm_head"], "task_type": "CAUSAL_LM"}
    by_peft = write_by_peft(tmp_path / "adapter", base, "AutoModelForCausalLM", **targets)
    theirs = reference(base)
    theirs[0].model = by_peft.base_model.model.model
    ours = await ServedModel(tmp_path / "adapter").embed(TEXTS)
    assert largest_difference(ours, theirs.encode(list(TEXTS))) < TOLERANCE


async def test_names_of_an_older_version_and_of_another_class_are_found(tmp_path: Path, base: Path, adapter: Path):
    expected = await ServedModel(adapter).embed(TEXTS)

    def rename(weights: dict[str, Any]) -> None:
        for name in list(weights):
            weights[name.replace("base_model.model.", "base_model.model.bert.")] = weights.pop(name)

    edit_weights(adapter / "adapter_model.safetensors", rename)
    assert largest_difference(await ServedModel(adapter).embed(TEXTS), expected) == 0


QWEN = {"num_attention_heads": 4, "hidden_size": 64}


@pytest.mark.parametrize(
    ("model", "config", "old", "new"),
    [
        ("NomicBertModel", {}, "encoder.layers.0.mlp.fc2", "layers.0.mlp.down_proj"),
        ("NomicBertModel", {}, "encoder.layers.0.attn.Wqkv", "encoder.layers.0.attn.Wqkv"),  # three weights today
        (
            "Qwen2VLModel",
            {"text_config": QWEN | {"num_key_value_heads": 2}, "vision_config": {"depth": 1}},
            "model.layers.0.self_attn.q_proj",
            "language_model.layers.0.self_attn.q_proj",
        ),
    ],
)
def test_names_of_older_versions_are_mapped_as_by_transformers(model: str, config: dict[str, Any], old: str, new: str):
    import transformers

    with torch.device("meta"):
        built: Any = getattr(transformers, model)(getattr(transformers, model.replace("Model", "Config"))(**config))
    assert renaming_to(built)(f"{old}.weight") == f"{new}.weight"
    assert (f"{new}.weight" in built.state_dict()) == (old != new)


@pytest.mark.parametrize("place", ["named", "beside", "hub", "given"])
def test_the_base_is_found(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    import huggingface_hub.constants

    hub = tmp_path / "hub" / "models--house--base"
    where = {"hub": hub / "snapshots" / "0123", "beside": tmp_path / "base"}.get(place, tmp_path / "elsewhere")
    write_json(where / "config.json", {"model_type": "bert", "vocab_size": 30})
    write_json(where / "tokenizer.json", {"of": "base"})
    write_json(where / "special_tokens_map.json", {})
    write_json(where / "1_Pooling" / "config.json", {})
    hub.joinpath("refs").mkdir(parents=True, exist_ok=True)
    hub.joinpath("refs", "main").write_text("0123")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    name = {"named": str(where), "hub": "house/base"}.get(place, "somebody/base")
    adapter = write_adapter(tmp_path / "adapter", base_model_name_or_path=name)
    write_json(adapter / "tokenizer.json", {"of": "adapter"})
    config = ModelConfig(adapter_base=str(where) if place == "given" else None, cache_dir=str(tmp_path / "cache"))
    joined = locate_model(str(adapter), config)
    assert joined == locate_model(str(adapter), config)
    assert {path.relative_to(joined).as_posix() for path in joined.rglob("*") if path.is_file()} == {
        "config.json", "tokenizer.json", "1_Pooling/config.json", "adapter_to_merge/adapter_config.json",
        "adapter_to_merge/adapter_model.safetensors",
    }  # fmt: skip
    assert json.loads((joined / "tokenizer.json").read_text()) == {"of": "adapter"}
    assert joined.is_relative_to(tmp_path / "cache")
    unkept = locate_model(str(adapter), ModelConfig(adapter_base=config.adapter_base, cache_dir=""))
    assert unkept.name == joined.name
    assert not unkept.is_relative_to(tmp_path / "cache")


def test_the_given_base_wins_over_a_folder_beside_the_adapter(tmp_path: Path):
    for place in ("base", "other/base"):
        write_json(tmp_path / place / "config.json", {"model_type": "bert", "of": place})
    adapter = write_adapter(tmp_path / "adapter", base_model_name_or_path="base")
    for given, place in (("other/base", "other/base"), (None, "base")):
        config = ModelConfig(adapter_base=given and str(tmp_path / given), cache_dir=str(tmp_path / "cache"))
        assert json.loads((locate_model(str(adapter), config) / "config.json").read_text())["of"] == place


def test_a_fifo_in_an_adapter_s_folder_is_refused_before_it_is_opened(tmp_path: Path):
    write_json(tmp_path / "base" / "config.json", {"model_type": "bert"})
    adapter = write_adapter(tmp_path / "adapter", base_model_name_or_path="base")
    (adapter / "adapter_model.safetensors").unlink()
    os.mkfifo(adapter / "adapter_model.safetensors")
    with pytest.raises(ModelLoadError, match="neither a file nor a folder"):
        locate_model(str(adapter), ModelConfig(cache_dir=str(tmp_path / "cache")))


def test_an_adapter_whose_base_is_not_known_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    adapter = str(write_adapter(tmp_path / "adapter"))
    with pytest.raises(ModelLoadError, match=r"adapter_config\.json: base_model_name_or_path is empty; set --adapter-"):
        locate_model(adapter)
    write_adapter(tmp_path / "adapter", base_model_name_or_path="no/such-model")
    with pytest.raises(ModelLoadError, match=r"base of the adapter .* not found; set --adapter-base\. no/such-model"):
        locate_model(adapter)
    with pytest.raises(ModelLoadError, match=r"--adapter-base requires .* contains no adapter_config\.json"):
        locate_model(str(tmp_path), ModelConfig(adapter_base="base"))


@pytest.mark.parametrize(
    ("tensors", "config", "said"),
    [
        (
            factors(QUERY, size=32, out=48),
            {},
            rf"{QUERY}.weight is \[32, 32\] in the model, but \[48, 32\] in the adapter",
        ),
        (
            factors("layers.0.q_proj"),
            {},
            "updates modules that BertModel does not have: layers.0.q_proj.weight. Its base is",
        ),
        (
            factors(QUERY, size=32, out=32),
            {"target_modules": ["query"]},
            "lacks tensors for modules of BertModel that its config names: encoder.layer.1.attention.self.query.weight",
        ),
        (
            factors(QUERY, size=32, out=32),
            {"modules_to_save": ["pooler"]},
            "lacks tensors for modules of BertModel that its config names: pooler.dense.bias, pooler.dense.weight",
        ),
        (factors("embeddings.LayerNorm", size=32, out=32), {}, "an update of a linear layer for a LayerNorm"),
        (factors("embeddings.word_embeddings"), {}, "an update of a linear layer for a Embedding"),
    ],
)
def test_an_adapter_of_another_base_is_refused(
    adapter: Path, tensors: dict[str, Any], config: dict[str, Any], said: str
):
    save_file(tensors, adapter / "adapter_model.safetensors")
    edit_json(
        adapter / "adapter_config.json", lambda document: document.update(target_modules="x") or document | config
    )
    refuse(adapter, said)


def test_an_adapter_of_a_model_without_a_transformer_is_refused(tmp_path: Path):
    base = next(iter(STATIC.values()))(tmp_path / "base")
    refuse(
        write_adapter(tmp_path / "adapter"), "an adapter needs a base that is one transformer", adapter_base=str(base)
    )


@pytest.mark.parametrize(
    "of", ["base/model.safetensors", "adapter/adapter_model.safetensors", "adapter/adapter_config.json"]
)
def test_the_digest_covers_base_and_adapter(of: str, tmp_path: Path):
    write_json(tmp_path / "base" / "config.json", {"model_type": "bert", "vocab_size": 30})
    save_file({"a": np.zeros(3)}, tmp_path / "base" / "model.safetensors")
    write_adapter(tmp_path / "adapter", base_model_name_or_path=str(tmp_path / "base"))
    config = ModelConfig(cache_dir="")

    def digests() -> object:
        return digest_of(locate_model(str(tmp_path / "adapter"), config), config)

    before = digests()
    assert digests() == before
    (tmp_path / of).write_bytes((tmp_path / of).read_bytes().replace(b"4", b"5") + b" ")
    assert digests() != before
