"""Weights of a checkpoint that its model does not use: known parts are one log line, others are refused."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.models.model_families import (
    TEXTS,
    ServedModel,
    edit_json,
    edit_weights,
    largest_difference,
    refuse,
    write_family,
)
from tests.models.retrieval_families import pylate_bert

WEIGHTS = "model.safetensors"


def add(path: Path, *names: str) -> None:
    edit_weights(path / WEIGHTS, lambda weights: weights.update({name: torch.ones(2) for name in names}))


HEADS = [
    ("bert", "BertForPreTraining"), ("bert", "BertForQuestionAnswering"), ("roberta", "RobertaForMaskedLM"),
    ("roberta", "RobertaForSequenceClassification"), ("mpnet", "MPNetForMaskedLM"),
    ("distilbert", "DistilBertForMaskedLM"), ("distilbert", "DistilBertForSequenceClassification"),
    ("modernbert", "ModernBertForMaskedLM"), ("qwen3", "Qwen3ForCausalLM"),
    ("mistral", "MistralForSequenceClassification"),
]  # fmt: skip


@pytest.mark.parametrize(("family", "name"), HEADS)
async def test_heads_of_other_tasks_are_one_log_line(
    family: str, name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.INFO, "trio_pool_serve.models")
    path = write_family(tmp_path / "model", family)
    before = await ServedModel(path).embed(TEXTS)
    base = transformers.AutoModel.from_pretrained(path)
    model = getattr(transformers, name)(base.config)
    model.base_model.load_state_dict(base.state_dict(), strict=False)
    model.save_pretrained(path)
    caplog.clear()
    assert largest_difference(await ServedModel(path).embed(TEXTS), before) < 1e-6
    assert len([record for record in caplog.messages if "weights are not used: " in record]) == 1


KNOWN: dict[str, tuple[str, ...]] = {
    "bert": ("cls.predictions.bias", "bert.embeddings.position_ids", "encoder.layer.2.output.dense.weight"),
    "qwen3": (
        "mtp.layers.0.mlp.down_proj.weight", "layers.0.self_attn.rotary_emb.inv_freq", "visual.patch_embed.weight",
        "layers.2.mlp.down_proj.weight", "h.0.attn.masked_bias", "h.0.attn.bias", "norm.num_batches_tracked",
    ),
}  # fmt: skip


@pytest.mark.parametrize("family", KNOWN)
async def test_buffers_towers_and_further_layers_are_not_used(
    family: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.INFO, "trio_pool_serve.models")
    path = write_family(tmp_path / "model", family)
    before = await ServedModel(path).embed(TEXTS)
    add(path, *KNOWN[family])
    assert largest_difference(await ServedModel(path).embed(TEXTS), before) == 0
    assert "weights are not used: " in caplog.text


@pytest.mark.parametrize("backend", ["torch", "auto"])
@pytest.mark.parametrize("name", ["linear.weight", "layers.1.adapter.weight", "text_projection.weight"])
def test_other_weights_are_refused_by_name(name: str, backend: str, tmp_path: Path):
    path = write_family(tmp_path / "model", "qwen3")
    add(path, name, "lm_head.weight")
    refuse(path, rf"Qwen3Model does not use these weights of the checkpoint: {name}\. Without", backend=backend)


def test_of_many_weights_some_are_named(tmp_path: Path):
    path = write_family(tmp_path / "model", "bert")
    add(path, *(f"crf.{letter}" for letter in "abcdefg"))
    refuse(path, r"does not use these weights of the checkpoint: crf\.a, crf\.b, crf\.c, crf\.d, crf\.e and 2 more\.")


def test_a_projection_beside_modules_is_colbert_s(tmp_path: Path):
    path = pylate_bert(tmp_path / "late")
    add(path, "linear.weight")
    ServedModel(path)


def published_voyage(path: Path, **config: Any) -> Path:
    """As voyage-4-nano is: a projection before the mean, which transformers' Qwen3 lacks."""
    write_family(path, "qwen3")
    add(path, "linear.weight")
    edit_json(path / "config.json", lambda whole: whole.update(use_bidirectional_attention=True, **config))
    return path


def test_voyage_4_nano_is_refused_for_its_projection(tmp_path: Path):
    refuse(published_voyage(tmp_path / "model"), "does not use these weights of the checkpoint: linear.weight")


def test_voyage_4_nano_s_own_class_is_refused_by_name(tmp_path: Path):
    code = {"auto_map": {"AutoModel": "modeling_voyage.VoyageModel"}, "architectures": ["VoyageModel"]}
    refuse(
        published_voyage(tmp_path / "model", **code), "architectures is VoyageModel, .* only with --trust-remote-code"
    )
