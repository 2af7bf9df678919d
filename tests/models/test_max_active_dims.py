"""A request's ``max_active_dims`` is sentence-transformers', alone and beside rows with another one."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from attrs import evolve

from tests.models.model_families import ServedModel, edit_json, shuffled
from tests.models.retrieval_families import DOCUMENTS, LATENTS, SPARSE, write_bge_m3
from tests.models.test_agreement import TEXTS_OF, difference
from trio_pool_serve.errors import ModelLoadError
from trio_pool_serve.types import Batch, SparseEmbed

Record = Callable[..., None]
LIMITS = (None, 1, 7, LATENTS, 2**31 - 1)


@pytest.mark.parametrize("backend", ["torch", "openvino"])
@pytest.mark.parametrize("name", ["csr", "splade_modernbert", "inference_free"])
async def test_the_greatest_weights_are_those_of_sentence_transformers(
    name: str, backend: str, tmp_path: Path, record_agreement: Record
):
    from sentence_transformers import SparseEncoder

    if backend == "openvino":
        pytest.importorskip("openvino")
    path = SPARSE[name](tmp_path / "model")
    ours = ServedModel(path, settings={"backend": backend, "cache_dir": ""})
    theirs = SparseEncoder(str(path), device="cpu", local_files_only=True)
    encoders: Any = {"query": theirs.encode_query, "document": theirs.encode_document, None: theirs.encode}
    requests, expected = [], []
    for kind, texts in TEXTS_OF.items():
        for limit in LIMITS:
            params = evolve(ours.folder.spec.sparse_params(kind), max_active_dims=limit)
            requests += await ours.ask(texts, [(params,)] * len(texts), kind)
            of_csr = min(limit, LATENTS) if limit and name == "csr" else limit  # torch has no more to choose from
            found = encoders[kind](list(texts), max_active_dims=of_csr, convert_to_sparse_tensor=False)
            expected.append(found.numpy())
    rows = np.concatenate(expected)
    together = await ours.runner.launch(Batch(tuple(requests)))
    differences = [difference(value, row) for (value,), row in zip(together, rows, strict=True)]
    for index in shuffled(range(len(requests)))[:20]:
        [(alone,)] = await ours.runner.launch(Batch((requests[index],)))
        differences.append(difference(alone, rows[index]))
    assert max(differences) < 1e-5
    record_agreement(f"{name}, max_active_dims", "sparse_embed", "SparseEncoder", max(differences))


@pytest.mark.parametrize("backend", ["torch", "openvino"])
async def test_lexical_weights_are_limited_to_the_greatest(backend: str, tmp_path: Path):
    if backend == "openvino":
        pytest.importorskip("openvino")
    ours = ServedModel(write_bge_m3(tmp_path / "model"), settings={"backend": backend, "cache_dir": ""})
    every = await ours.compute(DOCUMENTS, SparseEmbed())
    for row, limited in zip(every, await ours.compute(DOCUMENTS, SparseEmbed(3)), strict=True):
        greatest = np.sort(np.argsort(-row.values, kind="stable")[:3])
        assert limited.indices.tolist() == row.indices[greatest].tolist()
        assert np.abs(limited.values - row.values[greatest]).max(initial=0) < 1e-5


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("hidden_dim", 63, r"decoder.linear.weight is of shape \[64, 32\]; its shape must be \[63, 32\]"),
        ("input_dim", 31, r"decoder.linear.weight is of shape \[64, 32\]; its shape must be \[64, 31\]"),
    ],
)
def test_an_autoencoder_of_another_shape_is_refused(key: str, value: int, said: str, tmp_path: Path):
    path = SPARSE["csr"](tmp_path / "csr")
    edit_json(path / "2_SparseAutoEncoder" / "config.json", lambda config: config.update({key: value}))
    with pytest.raises(ModelLoadError, match=said):
        ServedModel(path)
