"""What each dialect responds to inputs without a text: the table in docs/api.md."""

from pathlib import Path
from typing import Any

import pytest

from tests.api.scripted_models import Everything, served_as
from tests.tables import each

PAGE = Path(__file__).parents[3] / "docs" / "api.md"

OLLAMA = {"model": ""}
COMPUTED, NONE, MISSING = "200", "200, no vector", "–"

RERANKED: dict[str, Any] = {"query": "hello"}

EMPTY = [
    (("/v1/embeddings", "/pooling", "/classify"), "input", {}, (COMPUTED, "400", COMPUTED)),
    (("/v2/embed", "/v1/embed"), "texts", {}, (MISSING, "400", COMPUTED)),
    (("/embed", "/embed_all", "/embed_sparse", "/predict", "/"), "inputs", {}, ("400 `Empty`",) * 3),
    (("/api/embed",), "input", OLLAMA, (NONE, NONE, COMPUTED)),
    (("/api/embeddings",), "prompt", OLLAMA, (NONE, MISSING, MISSING)),
    (("/vectors",), "text", {}, (COMPUTED, MISSING, MISSING)),
    (("/rerank", "/v1/rerank", "/v2/rerank"), "documents", RERANKED, (COMPUTED, "400", COMPUTED)),
    (("/rerank",), "texts", RERANKED, (MISSING, "400 `Empty`", COMPUTED)),
    (("/api/rerank",), "documents", {**RERANKED, **OLLAMA}, (MISSING, "400", COMPUTED)),
    (("/score",), "text_2", {"text_1": "hello"}, (COMPUTED, "400", COMPUTED)),
]
"""Routes, the field with the input, other fields, and the responses to an empty text, an empty list, and both."""

service = served_as(Everything())


@each(("paths", "field", "more", "expected"), EMPTY)
async def test_an_input_without_a_text_gets_the_response_of_the_table(client, service, paths, field, more, expected):
    more = {**more, **({"model": service.models.find().source.name} if "model" in more else {})}
    for path in paths:
        for given, answer in zip(("", [], [""]), expected, strict=True):
            response = await client.post(path, json={**more, field: given})
            body = response.json()
            if answer == MISSING:
                assert "must be a" in str(body), (path, given, body)
                continue
            assert response.status_code == int(answer[:3]), (path, given, body)
            assert ("Empty" in answer) == (isinstance(body, dict) and body.get("error_type") == "Empty")
            if response.status_code == 200 and path.startswith("/api/emb"):
                vectors = body.get("embeddings") or body.get("embedding")
                assert (answer == NONE) == (not vectors), (path, given, body)
            elif response.status_code == 400:
                assert "empty" in response.text


@pytest.mark.unit
def test_the_page_has_the_table():
    rows = [
        f"| {', '.join(f'`{path}`' for path in paths)} | `{field}` | {' | '.join(expected)} |"
        for paths, field, _, expected in EMPTY
    ]
    assert "\n".join(rows) in PAGE.read_text()
