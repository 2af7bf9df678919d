"""Pooled vectors of tokens, and scores of pooled documents, are sentence-transformers', through the whole service."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.end_to_end.folder_over_http import serving_folder
from tests.models.retrieval_families import DOCUMENTS, LATE_INTERACTION, QUERIES, assert_same_ranking
from trio_pool_serve import InvalidRequestError
from trio_pool_serve.python_api import open_model
from trio_pool_serve.types import Vectors

Record = Callable[..., None]
IN_FLOAT32: Any = {"dtype": "float32", "device": "cpu", "backend": "torch"}
TEXTS = {"query": list(QUERIES), "document": list(DOCUMENTS), None: list(DOCUMENTS)}


def farthest(ours: list[Vectors], expected: list[Any]) -> float:
    assert [each.shape for each in ours] == [tuple(each.shape) for each in expected]
    return max(float(np.abs(a - b.numpy()).max(initial=0)) for a, b in zip(ours, expected, strict=True))


def multi_vector_encoder(path: Path) -> Any:
    from sentence_transformers import MultiVectorEncoder

    return MultiVectorEncoder(str(path), device="cpu", local_files_only=True)


@pytest.mark.parametrize("name", ["pooled_documents", "pooled_queries_and_documents"])
async def test_a_model_that_pools_gives_its_vectors_and_scores(name: str, tmp_path: Path, record_agreement: Record):
    path = LATE_INTERACTION[name](tmp_path / name)
    theirs = multi_vector_encoder(path)
    queries, documents = theirs.encode_query(TEXTS["query"]), theirs.encode_document(TEXTS["document"])
    plain = theirs.encode(TEXTS[None])
    expected = theirs.similarity(queries, documents).numpy()
    async with open_model(path, **IN_FLOAT32) as model:
        found = {kind: await model.tokens(texts, input_type=kind, truncate=True) for kind, texts in TEXTS.items()}
        scores = np.stack([await model.score(query, TEXTS["document"], truncate=True) for query in TEXTS["query"]])
        paired = await model.score(TEXTS["document"][:5], TEXTS["document"][1:6], truncate=True)
        with pytest.raises(InvalidRequestError, match="this model's files already pool tokens, by the factor"):
            await model.tokens(["a text"], token_pooling=2)
    differences = [farthest(found["query"], queries), farthest(found["document"], documents)]
    assert max(*differences, farthest(found[None], plain)) < 1e-5
    assert_same_ranking(scores, expected)
    assert np.abs(scores - expected).max() < 1e-4
    of_documents = theirs.encode_query(TEXTS["document"][:5]), theirs.encode_document(TEXTS["document"][1:6])
    assert np.abs(paired - theirs.similarity_pairwise(*of_documents).numpy()).max() < 1e-4
    record_agreement(name, "score", "MultiVectorEncoder", float(np.abs(scores - expected).max()))


async def test_a_request_pools_documents_but_not_queries(tmp_path: Path, record_agreement: Record):
    from sentence_transformers.multi_vector_encoder.modules import HierarchicalTokenPooling

    path = LATE_INTERACTION["fixed_expansion"](tmp_path / "model")
    theirs, differences = multi_vector_encoder(path), []
    async with open_model(path, **IN_FLOAT32) as model:
        for factor in (1, 1.5, 3, 2**31 - 1):
            pooling = HierarchicalTokenPooling(factor)
            for kind, encode in (("query", theirs.encode_query), ("document", theirs.encode_document)):
                ours = await model.tokens(TEXTS[kind], input_type=kind, token_pooling=factor, truncate=True)
                differences.append(farthest(ours, encode(TEXTS[kind], token_pooling=pooling)))
        for wrong in (0.99, 0, -2, float("nan"), float("inf"), True, "2"):
            with pytest.raises(InvalidRequestError, match="token_pooling must be a number of at least 1"):
                await model.tokens(["a text"], token_pooling=wrong)
    assert max(differences) < 1e-5
    record_agreement("token_pooling of a request", "token_embed", "MultiVectorEncoder", max(differences))


async def test_the_field_of_pooling_and_embed_all_means_the_same(tmp_path: Path):
    from sentence_transformers.multi_vector_encoder.modules import HierarchicalTokenPooling

    path = LATE_INTERACTION["without_mask"](tmp_path / "model")
    theirs, texts = multi_vector_encoder(path), [text for text in DOCUMENTS if text]  # /embed_all refuses empty texts
    wanted = theirs.encode(texts, token_pooling=HierarchicalTokenPooling(2))
    as_means = theirs.encode(texts, token_pooling=HierarchicalTokenPooling(2, normalize_embeddings=False))
    async with serving_folder(path) as ours:
        pooled = await ours.pooled(texts, task="token_embed", token_pooling=2)
        of_all = await ours.post("/embed_all", inputs=texts, truncate=True, token_pooling=2, normalize=False)
    assert farthest([np.array(row) for row in pooled], wanted) < 1e-5
    assert farthest([np.array(row) for row in of_all], as_means) < 1e-5
