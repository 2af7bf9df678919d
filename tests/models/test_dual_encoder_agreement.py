"""Texts and images of dual encoders have the vectors that transformers and sentence-transformers give them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from attrs import frozen

from tests.models.model_families import largest_difference, reference, shuffled
from tests.models.vision_families import DUAL_ENCODERS, PICTURES, SENTENCES, SeeingModel
from tests.models.vision_oracles import dual_encoder_vectors
from trio_pool_serve.types import Batch, Embed, PoolingRequest, Vectors

TOLERANCE = 1e-5

BY_TRANSFORMERS = (
    "clip", "clip_of_today", "siglip", "siglip2_of_one_size", "siglip2_filled_on_the_left", "siglip2_masked",
    "siglip2_naflex",
)  # fmt: skip
BY_SENTENCE_TRANSFORMERS = (
    "clip", "clip_of_today", "clip_of_sentence_transformers", "clip_with_heads", "siglip_with_modules",
)  # fmt: skip
PARAMS = [(name, "transformers") for name in BY_TRANSFORMERS] + [
    (name, "sentence-transformers") for name in BY_SENTENCE_TRANSFORMERS
]

ITEMS = [*SENTENCES, *PICTURES]


@frozen(eq=False)
class Pair:
    """One folder, served here, and what the oracle makes of ITEMS."""

    family: str
    oracle: str
    ours: SeeingModel
    expected: Vectors


@pytest.fixture(scope="module", params=PARAMS, ids="-".join)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    name, oracle = request.param
    path = DUAL_ENCODERS[name](tmp_path_factory.mktemp("seeing") / name)
    return Pair(name, oracle, SeeingModel(path), dual_encoder_vectors(path, oracle))


async def test_each_alone_agrees(pair: Pair, record_agreement: Callable[..., None]):
    rows = await pair.ours.vectors_of(ITEMS, together=False)
    difference = largest_difference(rows, pair.expected)
    assert difference < TOLERANCE
    record_agreement(pair.family, "embed", pair.oracle, difference)


async def test_texts_and_images_in_one_shuffled_batch_agree(pair: Pair, record_agreement: Callable[..., None]):
    order = shuffled(ITEMS)
    rows = await pair.ours.vectors_of([ITEMS[index] for index in order])
    difference = largest_difference(rows, pair.expected[order])
    assert difference < TOLERANCE
    record_agreement(pair.family, "embed", pair.oracle, difference)


@pytest.mark.parametrize("items", [SENTENCES, PICTURES], ids=["texts", "images"])
async def test_one_kind_in_a_batch_agrees(pair: Pair, items: Any):
    first = 0 if items is SENTENCES else len(SENTENCES)
    rows = await pair.ours.vectors_of(items)
    assert largest_difference(rows, pair.expected[first : first + len(items)]) < TOLERANCE


def test_the_items_are_told_apart(pair: Pair):
    """Else agreement would prove nothing."""
    unit = pair.expected / np.linalg.norm(pair.expected, axis=1, keepdims=True)
    assert (unit @ unit.T - np.eye(len(ITEMS))).max() < 0.999


async def test_a_normalised_vector_is_cut_first(pair: Pair):
    rows = await pair.ours.vectors_of(ITEMS, Embed(dimensions=8, normalize=True))
    cut = pair.expected[:, :8]
    assert largest_difference(rows, cut / np.linalg.norm(cut, axis=1, keepdims=True)) < TOLERANCE


async def test_a_prompt_agrees(tmp_path: Path):
    path = DUAL_ENCODERS["clip_with_heads"](tmp_path / "clip")
    ours = SeeingModel(path)
    prompts = [await ours.read(text, instruction=ours.folder.prompts["query"]) for text in SENTENCES]
    rows = await ours.runner.launch(Batch(tuple(PoolingRequest(prompt, (Embed(),)) for prompt in prompts)))
    expected = reference(path).encode(list(SENTENCES), prompt_name="query")
    assert largest_difference([row for (row,) in rows], expected) < TOLERANCE
