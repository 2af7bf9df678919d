"""Vectors and scores of questions and pages are those of transformers and sentence-transformers, by every route."""

from pathlib import Path

import numpy as np
import pytest
import trio

from tests.conftest import wait_idle
from tests.end_to_end.folder_over_http import Record, farthest, one_of, serving_folder
from tests.end_to_end.seen_contents import as_base64, as_url, parts
from tests.models.model_families import shuffled
from tests.models.retrieval_families import assert_same_ranking
from tests.models.vision_families import PAGE_RETRIEVERS, PICTURES, SENTENCES
from tests.models.vision_oracles import page_vectors

TOLERANCE = 1e-5
SCORE_TOLERANCE = 1e-4


@pytest.mark.parametrize(
    ("name", "oracle"),
    one_of(
        [
            ("colqwen2", "transformers"),
            ("colpali", "transformers"),
            *((name, "sentence-transformers") for name in PAGE_RETRIEVERS),
        ],
        ("colqwen2", "transformers"),
    ),
)
async def test_questions_and_pages_agree(name: str, oracle: str, tmp_path: Path, record_agreement: Record):
    path = PAGE_RETRIEVERS[name](tmp_path / name)
    vectors, scores = page_vectors(path, oracle)
    inputs = [*SENTENCES, *({"image": as_base64(picture)} for picture in PICTURES)]
    pages = [{"content": parts([picture])} for picture in PICTURES]
    differences: list[float] = []
    rows = {route: np.zeros_like(scores) for route in ("/score", "/rerank")}
    async with serving_folder(path) as ours:

        async def questions_and_pages(seed: int) -> None:
            """Texts and images in one request, each twice."""
            order = shuffled(inputs, seed=seed)
            asked = [inputs[index] for index in order]
            found = await ours.pooled(asked, task="token_embed", input_type="query")
            differences.append(farthest(found, [vectors[index] for index in order]))

        async def pages_alone() -> None:
            found = await ours.pooled([as_url(picture) for picture in PICTURES], modality="image")
            differences.append(farthest(found, vectors[len(SENTENCES) :]))

        async def in_messages(index: int) -> None:
            content = [[sentence] for sentence in SENTENCES] + [[picture] for picture in PICTURES]
            messages = [{"role": "user", "content": parts(content[index])}]
            answer = await ours.post("/pooling", messages=messages, task="token_embed", input_type="query")
            differences.append(farthest([answer["data"][0]["data"]], [vectors[index]]))

        async def scored(question: int) -> None:
            rows["/score"][question] = await ours.scores(SENTENCES[question], pages)
            rows["/rerank"][question] = await ours.reranked(SENTENCES[question], pages)

        async with trio.open_nursery() as clients:
            for seed in range(3):
                clients.start_soon(questions_and_pages, seed)
            clients.start_soon(pages_alone)
            for index in (0, len(vectors) - 1):
                clients.start_soon(in_messages, index)
            for question in range(len(SENTENCES)):
                clients.start_soon(scored, question)
        await wait_idle(ours.service)
    difference = max(farthest(found, scores) for found in rows.values())
    assert max(differences) < TOLERANCE
    assert difference < SCORE_TOLERANCE
    for found in rows.values():
        assert_same_ranking(found, scores)
    record_agreement(name, "token_embed", oracle, max(differences))
    record_agreement(name, "score", oracle, difference)


@pytest.mark.parametrize("name", ["colqwen2", "colpali"])
async def test_a_page_is_an_input_by_itself(name: str, tmp_path: Path):
    path = PAGE_RETRIEVERS[name](tmp_path / name)
    both = parts(["what is this?", PICTURES[0]])
    async with serving_folder(path) as ours:
        for body, param in (
            ({"input": [{"text": "what is this?", "image": as_url(PICTURES[0])}]}, "input"),
            ({"messages": [{"role": "user", "content": both}]}, "messages"),
        ):
            answer = await ours.client.post("/pooling", json=body)
            assert answer.status_code == 400, answer.text
            error = answer.json()["error"]
            assert error["param"] == param
            assert "not several together" in error["message"], error
        score = await ours.client.post("/score", json={"text_1": "what is this?", "text_2": [{"content": both}]})
        assert score.status_code == 400, score.text
        await wait_idle(ours.service)
