"""Token vectors, MaxSim scores and sparse vectors are those of sentence-transformers, by every route."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.end_to_end.folder_over_http import WHOLE, Record, farthest, of_words, one_of, serving_folder
from tests.models.model_families import reference
from tests.models.retrieval_families import (
    DOCUMENTS,
    LATE_INTERACTION,
    MASKED_LMS,
    QUERIES,
    SPARSE,
    assert_same_ranking,
    write_bge_m3,
    write_masked_lm,
)
from tests.models.test_bge_m3_agreement import Expected, by_formula
from tests.models.test_sparse_agreement import relative_difference
from trio_pool_serve.types import Vectors

TOLERANCE = 1e-5
SCORE_TOLERANCE = 1e-4


def as_arrays(rows: Sequence[Any]) -> list[Vectors]:
    return [row.numpy() for row in rows]


# -- late interaction -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", one_of(LATE_INTERACTION, "pylate_bert"))
async def test_late_interaction_agrees(name: str, tmp_path: Path, record_agreement: Record):
    from sentence_transformers import MultiVectorEncoder

    path = LATE_INTERACTION[name](tmp_path / name)
    theirs = MultiVectorEncoder(str(path), device="cpu", local_files_only=True)
    expected = [tokens.numpy() for tokens in theirs.encode(list(DOCUMENTS))]
    queries, documents = theirs.encode_query(list(QUERIES)), theirs.encode_document(list(DOCUMENTS))
    scores = theirs.similarity(queries, documents).numpy()
    async with serving_folder(path) as ours:
        vectors = [
            farthest(await ours.pooled(DOCUMENTS, task="token_embed"), expected),
            farthest(await ours.pooled(DOCUMENTS[1:2]), expected[1:2]),
            farthest(await ours.post("/embed_all", inputs=of_words(DOCUMENTS)), of_words(DOCUMENTS, expected)),
            farthest(await ours.pooled(DOCUMENTS, input_type="document"), as_arrays(documents)),
            farthest(await ours.pooled(QUERIES, input_type="query"), as_arrays(queries)),
            farthest(
                await ours.post("/embed_all", inputs=of_words(QUERIES), prompt_name="query"),
                of_words(QUERIES, as_arrays(queries)),
            ),
        ]
        found = await ours.scores_by_route(QUERIES, DOCUMENTS)
        paired = await ours.scores(QUERIES, DOCUMENTS[: len(QUERIES)])
    for rows in found.values():
        assert_same_ranking(np.stack(rows), scores)
    difference = max(
        *(farthest(rows, scores) for rows in found.values()),
        farthest([paired], [np.diag(scores)]),
    )
    assert max(vectors) < TOLERANCE
    assert difference < SCORE_TOLERANCE
    record_agreement(name, "token_embed", "MultiVectorEncoder", max(vectors))
    record_agreement(name, "score", "MultiVectorEncoder", difference)


async def test_an_instruction_stands_behind_the_marker_of_queries(tmp_path: Path):
    from sentence_transformers import MultiVectorEncoder

    path = LATE_INTERACTION["pylate_bert"](tmp_path / "model")
    theirs = MultiVectorEncoder(str(path), device="cpu", local_files_only=True)
    queries = theirs.encode_query([QUERIES[0]], prompt=theirs.prompts["query"] + "about tasks: ")
    expected = theirs.similarity(queries, theirs.encode_document(list(DOCUMENTS))).numpy()
    async with serving_folder(path) as ours:
        found = await ours.scores(QUERIES[0], DOCUMENTS, instruction="about tasks: ")
    assert farthest([found], expected) < SCORE_TOLERANCE


# -- sparse ---------------------------------------------------------------------------------------------


def spread(rows: Sequence[Sequence[dict[str, Any]]], width: int) -> Vectors:
    """Return the weights of each text, float32, shape (texts, width)."""
    weights = np.zeros((len(rows), width), dtype=np.float32)
    for text, row in enumerate(rows):
        indices = [item["index"] for item in row]
        assert indices == sorted(set(indices))
        weights[text, indices] = [item["value"] for item in row]
    return weights


async def sparse_difference(path: Path, **loading: Any) -> float:
    """Ask for the vectors by every route, together and alone, with a prompt if the model has one."""
    from sentence_transformers import SparseEncoder

    theirs = SparseEncoder(str(path), device="cpu", local_files_only=True)
    dense = {"convert_to_sparse_tensor": False}
    expected = theirs.encode(list(DOCUMENTS), **dense).numpy()
    asked: dict[str, tuple[Any, Vectors]] = {}
    async with serving_folder(path, **loading) as ours:
        found = await ours.post("/embed_sparse", inputs=of_words(DOCUMENTS))
        asked["/embed_sparse"] = found, np.stack(of_words(DOCUMENTS, expected))
        asked["/pooling"] = await ours.pooled(DOCUMENTS, task="sparse_embed"), expected
        asked["/pooling of one"] = await ours.pooled(DOCUMENTS[1:2]), expected[1:2]
        for side, texts, encode in (
            ("query", QUERIES, theirs.encode_query),
            ("document", DOCUMENTS, theirs.encode_document),
        ):
            wanted = encode(list(texts), **dense).numpy()
            by_name = await ours.post("/embed_sparse", inputs=of_words(texts), prompt_name=side)
            asked[f"/embed_sparse {side}"] = by_name, np.stack(of_words(texts, wanted))
            asked[f"/pooling {side}"] = await ours.pooled(texts, input_type=side), wanted
    assert expected.any()
    return max(relative_difference(spread(rows, wanted.shape[1]), wanted) for rows, wanted in asked.values())


@pytest.mark.parametrize("name", one_of(SPARSE, "splade_max", "inference_free"))
async def test_sparse_vectors_agree(name: str, tmp_path: Path, record_agreement: Record):
    difference = await sparse_difference(SPARSE[name](tmp_path / name))
    assert difference < TOLERANCE
    record_agreement(name, "sparse_embed", "SparseEncoder", difference)


@pytest.mark.parametrize("name", one_of(MASKED_LMS, "bert"))
async def test_sparse_vectors_of_a_bare_masked_language_model_agree(
    name: str, tmp_path: Path, record_agreement: Record
):
    difference = await sparse_difference(write_masked_lm(tmp_path / name, name), task="sparse_embed")
    assert difference < TOLERANCE
    record_agreement(f"{name} masked language model", "sparse_embed", "SparseEncoder", difference)


# -- BGE-M3 ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("with_modules", [True, False])
async def test_bge_m3_agrees(tmp_path: Path, record_agreement: Record, *, with_modules: bool):
    path = write_bge_m3(tmp_path / "model", with_modules=with_modules)
    expected = by_formula(path, DOCUMENTS)
    async with serving_folder(path) as ours:
        together = await ours.pooled(DOCUMENTS, tasks=["embed", "sparse_embed", "token_embed"])
        reordered = await ours.pooled(DOCUMENTS[1:2], tasks=["token_embed", "embed", "sparse_embed"])
        dense = await ours.embeddings(DOCUMENTS, **WHOLE)
        weights = await ours.post("/embed_sparse", inputs=of_words(DOCUMENTS))
        tokens = await ours.post("/embed_all", inputs=of_words(DOCUMENTS))
        scores = [await ours.reranked(query, DOCUMENTS) for query in QUERIES]
    assert all(list(row) == ["embed", "sparse_embed", "token_embed"] for row in together)
    alone = [
        {"embed": vector, "sparse_embed": row, "token_embed": array}
        for vector, row, array in zip(of_words(DOCUMENTS, dense), weights, tokens, strict=True)
    ]
    wanted_alone = of_words(DOCUMENTS, expected)
    for rows, wanted in ((together, expected), (alone, wanted_alone), (reordered, expected[1:2])):
        for task, difference in differences_of_bge_m3(rows, wanted).items():
            assert difference < TOLERANCE
            record_agreement("bge-m3", task, "formulas of the paper", difference)
    empty = DOCUMENTS.index("")
    assert farthest([dense[empty]], [expected[empty].dense]) < TOLERANCE
    if with_modules:
        theirs = reference(path)
        similar = theirs.similarity(theirs.encode_query(list(QUERIES)), theirs.encode_document(list(DOCUMENTS))).numpy()
        assert_same_ranking(np.stack(scores), similar)
        difference = farthest(scores, similar)
        assert difference < SCORE_TOLERANCE
        record_agreement("bge-m3", "score", "SentenceTransformer", difference)


def differences_of_bge_m3(rows: Sequence[dict[str, Any]], expected: Sequence[Expected]) -> dict[str, float]:
    weights = [{item["index"]: item["value"] for item in row["sparse_embed"]} for row in rows]
    assert [sorted(found) for found in weights] == [sorted(wanted.weights) for wanted in expected]
    return {
        "embed": farthest([row["embed"] for row in rows], [wanted.dense for wanted in expected]),
        "sparse_embed": max(
            abs(value - wanted.weights[token])
            for found, wanted in zip(weights, expected, strict=True)
            for token, value in found.items()
        ),
        "token_embed": farthest([row["token_embed"] for row in rows], [wanted.tokens for wanted in expected]),
    }
