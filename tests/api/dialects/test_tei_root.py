"""``POST /`` does what the model is for."""

import pytest

from tests.api.dialects.tei_models import Judging, Served, serving
from tests.api.scripted_models import Judge, LateInteraction, ids_of, vector_of
from tests.tables import each
from trio_pool_serve.types import Classify, Embed, TokenEmbed


@pytest.mark.parametrize(
    ("inputs", "expected"),
    [
        ("hello", [ids_of("hello")]),
        (["hello", "world"], [ids_of("hello"), ids_of("world")]),
        ([7, 8], [[7, 8]]),
        ([[7, 8], [9]], [[7, 8], [9]]),
    ],
)
async def test_an_embedding_model_embeds(embedding: Served, inputs, expected):
    assert await embedding.ask("/", inputs=inputs, parameters={}) == [vector_of(ids) for ids in expected]
    assert set(embedding.params) == {Embed(normalize=True)}


async def test_options_are_read_from_the_body_and_from_its_parameters(embedding: Served):
    query = [vector_of(ids_of("query : hello"), 3)]
    options = {"prompt_name": "query", "dimensions": 3, "normalize": False}
    assert await embedding.ask("/", inputs="hello", **options) == query
    assert await embedding.ask("/", inputs="hello", parameters=options) == query
    assert await embedding.ask("/", inputs="hello", parameters={"prompt_name": "passage"}, **options) == query
    assert set(embedding.params) == {Embed(dimensions=3, normalize=False)}


async def test_parameters_may_say_what_to_cut(embedding: Served):
    ids = [n % 200 + 5 for n in range(100)]
    assert await embedding.refused("/", inputs=ids, parameters={"truncate": False}) == (422, "Validation")
    cut = {"truncate": True, "truncation_direction": "left"}
    assert await embedding.ask("/", inputs=ids, parameters=cut) == [vector_of(ids[-64:])]


async def test_a_late_interaction_model_embeds_every_token(config):
    async with serving(config, LateInteraction()) as served:
        assert await served.ask("/", inputs=[7, 8]) == [[vector_of([7]), vector_of([8])]]
        assert await served.ask("/", inputs=[7], parameters={"normalize": True}) == [[vector_of([7])]]
        assert served.params == [TokenEmbed(), TokenEmbed(normalize=True)]


async def test_a_classifier_answers_a_list_even_to_a_single_text(classifying: Served):
    labels = await classifying.ask("/predict", inputs="hello")
    assert await classifying.ask("/", inputs="hello", parameters={}) == [labels]
    assert await classifying.ask("/", inputs=[["hello"]]) == [labels]
    pair = await classifying.ask("/predict", inputs=["hello", "world"])
    assert await classifying.ask("/", inputs=["hello", "world"]) == pair
    await classifying.ask("/", inputs="hello", raw_scores=True)
    await classifying.ask("/", inputs="hello", parameters={"raw_scores": True})
    assert classifying.params[-2:] == [Classify("raw"), Classify("raw")]


@pytest.mark.parametrize("kind", [Judging, Judge])
async def test_texts_are_ranked(config, kind):
    async with serving(config, kind(), labels=1) as served:
        body = {"query": "hello", "texts": ["w1", "w1 w2"], "return_text": True}
        ranks = await served.ask("/rerank", **body)
        assert [rank["index"] for rank in ranks] == [1, 0]
        assert await served.ask("/", **body) == ranks
        assert await served.ask("/", **body, inputs=None, parameters={"raw_scores": True}) == ranks
        assert served.params[-1] == Classify("raw")
        assert await served.refused("/", query="hello", texts=[]) == (400, "Empty")
        assert await served.refused("/", texts=["w1"]) == (422, "Validation")


async def test_a_judge_of_pairs_classifies_inputs(config):
    async with serving(config, Judging(), labels=1) as served:
        ((label,),) = await served.ask("/", inputs=[["hello", "world"]])
        assert label["label"] == "fits"


async def test_a_model_that_only_ranks_says_what_it_needs(config):
    async with serving(config, Judge(), labels=1) as served:
        assert await served.refused("/", inputs="hello") == (422, "Validation")
        assert "`query` and `texts`" in (await served.http.post("/", json={"inputs": "hello"})).json()["error"]


@each(
    "body",
    [
        {},
        {"inputs": {"source_sentence": "hello"}},
        {"inputs": ["hello", 5]},
        {"inputs": [["hello"]]},
        {"inputs": [[5, "hello"]]},
        {"inputs": "hello", "parameters": {"truncate": "yes"}},
        {"inputs": "hello", "parameters": {"prompt_name": "poem"}},
    ],
)
async def test_what_cannot_be_embedded_is_422(embedding: Served, body):
    assert await embedding.refused("/", **body) == (422, "Validation")
