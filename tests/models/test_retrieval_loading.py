"""Weights of late-interaction, sparse and BGE-M3 models that are missing or do not fit are named."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.models.model_families import edit_json, load
from tests.models.retrieval_families import (
    colbert_v2,
    colbert_without_metadata,
    inference_free,
    opensearch,
    pylate_bert,
    splade_max,
    write_bge_m3,
)
from trio_pool_serve.errors import ModelLoadError
from trio_pool_serve.types import Embed, MaxSim, SparseEmbed, SparseLookup, TokenEmbed


def edit_weights(path: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    weights = load_file(path)
    edit(weights)
    path.unlink()
    save_file(weights, path, metadata={"format": "pt"})


def refuse(folder: Path, said: str) -> None:
    with pytest.raises(ModelLoadError, match=said):
        load(folder)


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


@pytest.mark.parametrize("write", [colbert_v2, colbert_without_metadata])
def test_a_colbert_without_its_projection_is_refused(tmp_path: Path, write: Callable[[Path], Path]):
    path = write(tmp_path / "model")
    if (path / "model.safetensors").is_file():
        edit_weights(path / "model.safetensors", lambda weights: weights.pop("linear.weight"))
    else:
        weights = torch.load(path / "pytorch_model.bin", weights_only=True)
        del weights["linear.weight"]
        torch.save(weights, path / "pytorch_model.bin")
    refuse(path, "no linear.weight, the projection of a ColBERT")


def test_a_projection_of_another_size_is_refused(tmp_path: Path):
    path = pylate_bert(tmp_path / "model")
    edit_json(path / "1_Dense" / "config.json", lambda config: config.update(out_features=7))
    refuse(path, "module cannot be loaded")


def test_a_projection_that_does_not_fit_the_transformer_is_refused(tmp_path: Path):
    path = colbert_v2(tmp_path / "model")
    edit_weights(path / "model.safetensors", lambda weights: weights.update({"linear.weight": torch.ones(4, 5)}))
    refuse(path, "cannot compute its first batch")


def test_a_splade_without_its_language_models_head_is_refused(tmp_path: Path):
    path = splade_max(tmp_path / "model")
    head = "cls.predictions.transform.dense.weight"
    edit_weights(path / "model.safetensors", lambda weights: weights.pop(head))
    refuse(path, f"lacks 1 weights, {head}")


def test_a_table_without_weights_is_refused(tmp_path: Path):
    path = opensearch(tmp_path / "model")
    torch.save({"idf": torch.ones(3)}, path / "query_0_SparseStaticEmbedding" / "pytorch_model.bin")
    refuse(path, "has no weight named weight")


def test_a_table_longer_than_the_vocabulary_is_refused(tmp_path: Path):
    path = opensearch(tmp_path / "model")
    torch.save({"weight": torch.ones(9999)}, path / "query_0_SparseStaticEmbedding" / "pytorch_model.bin")
    refuse(path, "9999 weights for a vocabulary of")


@pytest.mark.parametrize("name", ["sparse_linear.pt", "colbert_linear.pt"])
def test_a_layer_of_bge_m3_that_cannot_be_read_is_refused(tmp_path: Path, name: str):
    path = write_bge_m3(tmp_path / "model")
    (path / name).write_bytes(b"no weights")
    refuse(path, f"{name} cannot be loaded")
