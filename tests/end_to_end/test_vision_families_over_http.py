"""Vectors of texts and images are those of transformers and sentence-transformers, in every dialect's form.

Every form is asked at once by a client of its own, so that texts and images of different requests share batches.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio

from tests.conftest import wait_idle
from tests.end_to_end.folder_over_http import WHOLE, AskedFolder, Record, farthest, one_of, serving_folder
from tests.end_to_end.seen_contents import OF_IMAGES, OF_OBJECTS, OF_PARTS, as_url, goes_into_an_object, parts
from tests.models.model_families import reference, shuffled
from tests.models.retrieval_families import assert_same_ranking
from tests.models.vision_families import (
    CONTENTS,
    DUAL_ENCODERS,
    PAGE_RETRIEVERS,
    PICTURES,
    SENTENCES,
    VISION_LANGUAGE,
    Content,
    qwen_states,
)
from tests.models.vision_oracles import chat_template_kwargs, dual_encoder_vectors, last_at_unit_length, page_vectors
from trio_pool_serve.types import Vectors

TOLERANCE = 1e-5
SCORE_TOLERANCE = 1e-4

Asks = Mapping[str, Callable[[], Awaitable[float]]]
"""By form: how far from the oracle the answer to a client is."""


async def asked_at_once(ours: AskedFolder, asks: Asks) -> dict[str, float]:
    """Let each client ask; all must be answered, and leave nothing."""
    differences: dict[str, float] = {}

    async def one(form: str, ask: Callable[[], Awaitable[float]]) -> None:
        differences[form] = await ask()

    async with trio.open_nursery() as nursery:
        for form, ask in asks.items():
            nursery.start_soon(one, form, ask)
    await wait_idle(ours.service)
    return differences


def in_every_form(ours: AskedFolder, contents: Sequence[Content], expected: Vectors) -> Asks:
    """Requests for all contents, texts among images, each form in an order of its own."""
    asks: dict[str, Callable[[], Awaitable[float]]] = {}

    def compare(request: Callable[[AskedFolder, Any], Awaitable[Vectors]], inputs: Sequence[Any], rows: Vectors) -> Any:
        async def ask() -> float:
            return farthest(await request(ours, inputs), rows)

        return ask

    for seed, (form, request) in enumerate({**OF_OBJECTS, **OF_PARTS}.items()):
        fits = [index for index, content in enumerate(contents) if form in OF_PARTS or goes_into_an_object(content)]
        order = [fits[place] for place in shuffled(fits, seed=seed)]
        asks[form] = compare(request, [contents[index] for index in order], expected[order])
    alone = [index for index, content in enumerate(contents) if len(content) == 1 and not isinstance(content[0], str)]
    for form, image_request in OF_IMAGES.items():
        asks[form] = compare(image_request, [contents[index][0] for index in alone], expected[alone])
    return asks


def in_messages(ours: AskedFolder, contents: Sequence[Content], expected: Vectors, **options: Any) -> Asks:
    """A request for each content, as vLLM's clients send images to any model."""

    async def ask(index: int) -> float:
        conversation = [{"role": "user", "content": parts(contents[index])}]
        answer = await ours.post("/v1/embeddings", messages=conversation, **options)
        return farthest([answer["data"][0]["embedding"]], expected[index : index + 1])

    return {f"messages {index}": partial(ask, index) for index in range(len(contents))}


# -- dual encoders ----------------------------------------------------------------------------------------


async def test_a_dual_encoder_agrees(tmp_path: Path, record_agreement: Record):
    path = DUAL_ENCODERS["clip"](tmp_path / "clip")
    expected = dual_encoder_vectors(path, "transformers")
    contents = [[item] for item in (*SENTENCES, *PICTURES)]
    async with serving_folder(path) as ours:
        each = in_messages(ours, contents, expected, truncate_prompt_tokens=-1)
        differences = await asked_at_once(ours, {**in_every_form(ours, contents, expected), **each})
        differences["input"] = farthest(await ours.embeddings(SENTENCES, **WHOLE), expected[: len(SENTENCES)])
    assert max(differences.values()) < TOLERANCE, differences
    record_agreement("clip", "embed", "transformers", max(differences.values()))


async def test_images_are_ranked_for_a_text(tmp_path: Path, record_agreement: Record):
    path = DUAL_ENCODERS["clip_with_heads"](tmp_path / "clip")
    theirs = reference(path)
    scores = theirs.similarity(theirs.encode_query(list(SENTENCES)), theirs.encode_document(list(PICTURES))).numpy()
    documents = [{"content": parts([picture])} for picture in PICTURES]
    async with serving_folder(path) as ours:
        found = [await ours.scores(sentence, documents) for sentence in SENTENCES]
        ranked = [await ours.reranked(sentence, documents) for sentence in SENTENCES]
    for rows in (found, ranked):
        assert farthest(rows, scores) < SCORE_TOLERANCE
        assert_same_ranking(np.stack(rows), scores)
    record_agreement("clip_with_heads", "score", "sentence-transformers", farthest([*found, *ranked], [*scores] * 2))


@pytest.mark.parametrize("name", ["colqwen2_with_modules", "colqwen2_pooled"])
async def test_pages_are_ranked_for_a_question_by_all_vectors_or_by_pooled_ones(
    name: str, tmp_path: Path, record_agreement: Record
):
    path = PAGE_RETRIEVERS[name](tmp_path / name)
    vectors, scores = page_vectors(path, "sentence-transformers")
    documents = [{"content": parts([picture])} for picture in PICTURES]
    async with serving_folder(path) as ours:
        found = [await ours.scores(sentence, documents) for sentence in SENTENCES]
        asked = [{"messages": [{"role": "user", "content": parts([page])}]} for page in PICTURES]
        pages = [(await ours.post("/pooling", **body))["data"][0]["data"] for body in asked]
    assert farthest(found, scores) < SCORE_TOLERANCE
    assert farthest(pages, vectors[len(SENTENCES) :]) < TOLERANCE
    record_agreement(name, "score", "sentence-transformers", farthest(found, scores))


@pytest.mark.parametrize(("name", "route"), [("clip", "/v1/embeddings"), ("colqwen2", "/pooling")])
async def test_an_input_of_a_dual_encoder_or_a_page_retriever_is_a_text_or_an_image(
    name: str, route: str, tmp_path: Path
):
    path = {**DUAL_ENCODERS, **PAGE_RETRIEVERS}[name](tmp_path / name)
    async with serving_folder(path) as ours:
        for body in (
            {"input": [{"text": "a cat", "image": as_url(PICTURES[0])}, "hello"]},
            {"messages": [{"role": "user", "content": parts(["a cat", PICTURES[0]])}]},
            {"messages": [{"role": "user", "content": "a cat"}, {"role": "assistant", "content": "a dog"}]},
            {"messages": [{"role": "system", "content": "a cat"}]},
            {"messages": [{"role": "user", "content": []}]},
        ):
            answer = await ours.client.post(route, json=body)
            assert answer.status_code == 400, answer.text
            assert answer.json()["error"]["param"] == next(iter(body))
        await wait_idle(ours.service)


# -- vision-language models -------------------------------------------------------------------------------

TEXT_BEFORE_IMAGE: Content = ["Which is larger?", PICTURES[5]]


@pytest.mark.parametrize("name", one_of(VISION_LANGUAGE, "qwen3_vl"))
async def test_vision_language_models_agree(name: str, tmp_path: Path, record_agreement: Record):
    path = VISION_LANGUAGE[name](tmp_path / name)
    options = chat_template_kwargs(path)
    contents = [*CONTENTS, TEXT_BEFORE_IMAGE]
    expected = last_at_unit_length(qwen_states(path, contents, **options))
    async with serving_folder(path) as ours:
        each = in_messages(ours, contents, expected, **options)
        differences = await asked_at_once(ours, {**in_every_form(ours, contents, expected), **each})
    assert max(differences.values()) < TOLERANCE, differences
    record_agreement(name, "embed", "transformers", max(differences.values()))
