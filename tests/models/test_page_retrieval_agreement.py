"""Questions and pages have the vectors, and the scores, that transformers and sentence-transformers give them."""

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from attrs import frozen
from PIL import Image

from tests.models.model_families import largest_difference, shuffled
from tests.models.retrieval_families import assert_same_ranking
from tests.models.vision_families import PAGE_RETRIEVERS, PICTURES, SENTENCES, SeeingModel
from tests.models.vision_oracles import page_vectors
from trio_pool_serve.types import Batch, MaxSim, PoolingRequest, RenderedPrompt, TokenEmbed, Vectors

TOLERANCE = 1e-5
SCORE_TOLERANCE = 1e-4

ITEMS = [*SENTENCES, *PICTURES]


@frozen(eq=False)
class Pair:
    """One folder, served here, with the oracle's vectors of ITEMS and the scores of all questions with all pages."""

    family: str
    oracle: str
    ours: SeeingModel
    vectors: Sequence[Vectors]
    scores: Vectors

    async def prompts(self, items: Sequence[str | Image.Image]) -> list[RenderedPrompt]:
        return [await self.ours.read(item, input_type="query") for item in items]


@pytest.fixture(
    scope="module",
    params=[("colqwen2", "transformers"), ("colpali", "transformers")]
    + [(name, "sentence-transformers") for name in PAGE_RETRIEVERS],
    ids="-".join,
)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    name, oracle = request.param
    path = PAGE_RETRIEVERS[name](tmp_path_factory.mktemp("seeing") / name)
    return Pair(name, oracle, SeeingModel(path), *page_vectors(path, oracle))


async def test_each_alone_agrees(pair: Pair, record_agreement: Callable[..., None]):
    rows = []
    for prompt in await pair.prompts(ITEMS):
        rows += [row for (row,) in await pair.ours.runner.launch(Batch((PoolingRequest(prompt, (TokenEmbed(),)),)))]
    difference = largest_difference(rows, pair.vectors)
    assert difference < TOLERANCE
    record_agreement(pair.family, "token_embed", pair.oracle, difference)


async def test_questions_and_pages_in_one_shuffled_batch_agree(pair: Pair, record_agreement: Callable[..., None]):
    order = shuffled(ITEMS)
    prompts = await pair.prompts([ITEMS[index] for index in order])
    batch = Batch(tuple(PoolingRequest(prompt, (TokenEmbed(),)) for prompt in prompts))
    difference = largest_difference(
        [row for (row,) in await pair.ours.runner.launch(batch)], [pair.vectors[index] for index in order]
    )
    assert difference < TOLERANCE
    record_agreement(pair.family, "token_embed", pair.oracle, difference)


async def test_scores_and_ranking_agree(pair: Pair, record_agreement: Callable[..., None]):
    questions, pages = await pair.prompts(SENTENCES), await pair.prompts(PICTURES)
    stage_one = Batch(tuple(PoolingRequest(prompt, (TokenEmbed(),)) for prompt in questions))
    params = tuple(MaxSim(vectors) for (vectors,) in await pair.ours.runner.launch(stage_one))
    stage_two = Batch(tuple(PoolingRequest(page, params) for page in pages))
    rows = await pair.ours.runner.launch(stage_two)
    scores = np.array([[float(score[0]) for score in row] for row in rows]).T
    difference = float(np.abs(scores - pair.scores).max())
    assert difference < SCORE_TOLERANCE
    assert_same_ranking(scores, pair.scores)
    record_agreement(pair.family, "score", pair.oracle, difference)


def test_the_items_are_told_apart(pair: Pair):
    """Else agreement would prove nothing."""
    assert np.ptp(pair.scores, axis=1).min() > 0.01
    assert np.ptp(pair.scores, axis=0).min() > 0.01
