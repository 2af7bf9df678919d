"""Weights of late-interaction, sparse and BGE-M3 models that are missing or do not fit are named."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models.model_families import edit_json, edit_weights, load, refuse, without
from tests.models.retrieval_families import (
    colbert_v2,
    colbert_without_metadata,
    inference_free,
    opensearch,
    pylate_bert,
    splade_max,
    write_bge_m3,
)
from trio_pool_serve.types import Embed, MaxSim, SparseEmbed, SparseLookup, TokenEmbed


def test_each_kind_has_the_heads_that_it_can_be_asked_for(tmp_path: Path):
    assert set(load(pylate_bert(tmp_path / "late")).heads) == {TokenEmbed, MaxSim}
    assert set(load(splade_max(tmp_path / "splade")).heads) == {SparseEmbed}
    assert set(load(inference_free(tmp_path / "free")).heads) == {SparseEmbed, SparseLookup}
    assert set(load(write_bge_m3(tmp_path / "bge")).heads) == {Embed, SparseEmbed, TokenEmbed}


def test_batches_of_a_vocabularys_width_are_smaller(tmp_path: Path):
    path = splade_max(tmp_path / "splade")
    small = load(path).default_batch_tokens
    assert small == 2048
    wide = 200_000
    edit_json(path / "config.json", lambda config: config.update(vocab_size=wide))
    vocabulary = {"bert.embeddings.word_embeddings.weight", "cls.predictions.bias", "cls.predictions.decoder.bias"}

    def widen(weights: dict[str, torch.Tensor]) -> None:
        for name in vocabulary & set(weights):
            old = weights[name]
            weights[name] = torch.zeros(wide, *old.shape[1:])
            weights[name][: len(old)] = old

    edit_weights(path / "model.safetensors", widen)
    assert load(path, dtype="float32").default_batch_tokens == 2**30 // (4 * wide) == 1342


WEIGHTS, TABLE = "model.safetensors", "query_0_SparseStaticEmbedding/pytorch_model.bin"
HEAD = "cls.predictions.transform.dense.weight"


@pytest.mark.parametrize(
    ("write", "file", "edit", "said"),
    [
        (colbert_v2, WEIGHTS, without("linear.weight"), "no linear.weight, the projection of a ColBERT"),
        (colbert_without_metadata, "pytorch_model.bin", without("linear.weight"), "no linear.weight, the projection"),
        (colbert_v2, WEIGHTS, lambda found: found.update({"linear.weight": torch.ones(4, 5)}), "cannot compute its fi"),
        (pylate_bert, "1_Dense/config.json", lambda found: found.update(out_features=7), "module cannot be loaded"),
        (splade_max, WEIGHTS, without(HEAD), f"lacks 1 weights, {HEAD}"),
        (opensearch, TABLE, lambda found: found.update(idf=found.pop("weight")), "has no weight named weight"),
        (opensearch, TABLE, lambda found: found.update(weight=torch.ones(9999)), "9999 weights for a vocabulary of"),
    ],
)
def test_weights_that_are_missing_or_do_not_fit_are_named(tmp_path: Path, write: Any, file: str, edit: Any, said: str):
    path = write(tmp_path / "model") / file
    (edit_json if path.suffix == ".json" else edit_weights)(path, edit)
    refuse(tmp_path / "model", said)


@pytest.mark.parametrize("name", ["sparse_linear.pt", "colbert_linear.pt"])
def test_a_layer_of_bge_m3_that_cannot_be_read_is_refused(tmp_path: Path, name: str):
    path = write_bge_m3(tmp_path / "model")
    (path / name).write_bytes(b"no weights")
    refuse(path, f"{name} cannot be loaded")
