"""Static embeddings' answers are those of sentence-transformers, by every route that gives them."""

from pathlib import Path

import numpy as np
import pytest

from tests.end_to_end.folder_over_http import Record, farthest, serving_folder
from tests.models.model_families import TEXTS
from tests.models.retrieval_families import DOCUMENTS, QUERIES, assert_same_ranking
from tests.models.static_families import STATIC, static_reference

ORACLE = "SentenceTransformer"


@pytest.mark.parametrize("name", ["static_of_old", "static_float64"])
async def test_vectors_and_scores_agree(name: str, tmp_path: Path, record_agreement: Record):
    path = STATIC[name](tmp_path / name)
    theirs, texts = static_reference(path), list(TEXTS)
    queries, documents = theirs.encode_query(list(QUERIES)), theirs.encode_document(list(DOCUMENTS))
    expected = theirs.similarity(queries, documents).numpy()
    async with serving_folder(path, backend="auto") as ours:
        differences = [
            farthest(await ours.embeddings(texts), theirs.encode(texts)),
            farthest(await ours.embeddings(texts, input_type="query"), theirs.encode_query(texts)),
            farthest(await ours.embeddings(texts, input_type="document"), theirs.encode_document(texts)),
            farthest(await ours.embeddings(texts, prompt="x: "), theirs.encode(texts, prompt="x: ")),
            farthest(await ours.pooled(texts, task="embed"), theirs.encode(texts)),
            farthest(await ours.post("/embed", inputs=texts[:2]), theirs.encode(texts[:2], normalize_embeddings=True)),
        ]
        found = await ours.scores_by_route(QUERIES, DOCUMENTS)
        info, models = [await ours.client.get(route) for route in ("/info", "/v1/models")]
        refused = await ours.client.post("/pooling", json={"input": "x", "task": "token_embed"})
    for rows in found.values():
        assert_same_ranking(np.stack(rows), expected)
    scores = max(farthest(rows, expected) / max(1, np.abs(expected).max()) for rows in found.values())
    assert max(*differences, scores) < 1e-5
    assert info.json()["model_type"] == {"embedding": {"pooling": "mean"}}
    assert info.json()["max_input_length"] == models.json()["data"][0]["max_model_len"] == 2**17
    assert refused.status_code == 400
    record_agreement(name, "embed", ORACLE, max(differences))
    record_agreement(name, "score", ORACLE, scores)


async def test_the_windows_of_a_long_text_have_no_special_tokens(tmp_path: Path):
    """So their mean, weighted by their tokens, is the vector of the whole text."""
    path = STATIC["static"](tmp_path / "static")
    async with serving_folder(path, backend="auto", max_model_len=10, long_text="chunk") as ours:
        assert farthest(await ours.embeddings(TEXTS), static_reference(path).encode(list(TEXTS))) < 1e-5
