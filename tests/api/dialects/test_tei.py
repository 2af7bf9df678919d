"""TEI's routes for vectors and tokens; the runner is scripted, so every answer is known."""

import attrs
import pytest

from tests.api.dialects.tei_models import Served, Sparse, serving
from tests.api.scripted_models import LONG, LateInteraction, ids_of, vector_of
from tests.model_folders import VOCABULARY
from tests.tables import each
from trio_pool_serve.types import TokenEmbed


@pytest.fixture
async def late(config):
    async with serving(config, LateInteraction()) as served:
        yield served


# -- /embed ----------------------------------------------------------------------------------------------


async def test_large_answers_keep_their_order(embedding: Served):
    inputs = [[n % 200 + 5] for n in range(700)]
    assert await embedding.ask("/embed", inputs=inputs) == [vector_of(ids) for ids in inputs]


# -- /embed_all, /embed_sparse ---------------------------------------------------------------------------


async def test_token_vectors_keep_the_model_s_own_length_unless_asked_otherwise(embedding: Served):
    for given in ({}, {"normalize": True}, {"normalize": False}, {"dimensions": 3}):
        await embedding.ask("/embed_all", inputs="hello", **given)
    assert embedding.params == [
        TokenEmbed(),
        TokenEmbed(normalize=True),
        TokenEmbed(normalize=False),
        TokenEmbed(dimensions=3),
    ]


async def test_large_token_answers_are_whole(late: Served):
    answer = await late.ask("/embed_all", inputs=[[7, 8, 9]] * 100)
    assert answer == [[vector_of([token]) for token in (7, 8, 9)]] * 100


async def test_texts_are_read_the_same_way_on_all_three(config):
    for path, spec in (("/embed", None), ("/embed_all", LateInteraction()), ("/embed_sparse", Sparse())):
        async with serving(config, spec) as served:
            await served.ask(path, inputs="hello", prompt_name="query")
            await served.ask(path, inputs=LONG)
            await served.ask(path, inputs=LONG, truncation_direction="left")
            read = [request.prompt.token_ids for batch in served.runner.batches for request in batch.requests]
            assert read[0].tolist() == ids_of("query : hello"), path
            assert read[1].tolist()[1] == VOCABULARY["w0"], path
            assert read[2].tolist()[-2] == VOCABULARY["w99"], path
            assert await served.refused(path, inputs=LONG, truncate=False) == (422, "Validation")
            assert await served.refused(path, inputs=[]) == (400, "Empty")


# -- /tokenize, /decode ----------------------------------------------------------------------------------


async def test_tokenize_cuts_nothing(embedding: Served):
    (tokens,) = await embedding.ask("/tokenize", inputs=LONG)
    assert len(tokens) == 102


@each(
    ("path", "body"),
    [
        ("/tokenize", {"inputs": 5}),
        ("/tokenize", {"inputs": [5]}),
        ("/tokenize", {"inputs": "hello", "add_special_tokens": "yes"}),
        ("/tokenize", {"inputs": "hello", "prompt_name": "poem"}),
        ("/tokenize", {"inputs": ["hello"] * 2049}),
        ("/decode", {}),
        ("/decode", {"ids": "hello"}),
        ("/decode", {"ids": ["hello"]}),
        ("/decode", {"ids": [5, [6]]}),
        ("/decode", {"ids": [100_000]}),
        ("/decode", {"ids": [-1]}),
        ("/decode", {"ids": [10**30]}),
        ("/decode", {"ids": [5], "skip_special_tokens": 2}),
    ],
)
async def test_what_cannot_be_taken_apart_or_put_together_is_422(embedding: Served, path, body):
    assert await embedding.refused(path, **body) == (422, "Validation")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"inputs": []}),
        ("/tokenize", {"inputs": ""}),
        ("/tokenize", {"inputs": ["a", ""]}),
        ("/decode", {"ids": []}),
        ("/decode", {"ids": [[]]}),
    ],
)
async def test_nothing_to_take_apart_or_put_together_is_empty(embedding: Served, path, body):
    assert await embedding.refused(path, **body) == (400, "Empty")


# -- all routes ------------------------------------------------------------------------------------------


async def test_every_route_says_what_was_read_and_where_the_time_went(embedding: Served):
    answers = [
        (await embedding.ok("/embed", inputs=["hello", "world world"]), "7", "16"),
        (await embedding.ok("/embed", inputs=[[7, 8]]), "2", None),
        (await embedding.ok("/embed_all", inputs="hello"), "3", "5"),
        (await embedding.ok("/rerank", query="w1", texts=["w2", "w3"]), "11", "8"),  # the query in each pair
        (await embedding.ok("/similarity", inputs={"source_sentence": "w1", "sentences": ["w2"]}), "6", "4"),
        (await embedding.ok("/tokenize", inputs="hello"), "3", "5"),
        (await embedding.ok("/decode", ids=[5, 6]), "2", None),
        (await embedding.ok("/", inputs="hello"), "3", "5"),
    ]
    for answer, tokens, characters in answers:
        assert answer.headers["x-compute-tokens"] == tokens
        assert answer.headers.get("x-compute-characters") == characters
        times = {
            name: int(answer.headers[f"x-{name}-time"])
            for name in ("compute", "total", "tokenization", "queue", "inference")
        }
        assert min(times.values()) >= 0
        assert times["total"] >= times["compute"] >= times["tokenization"]
        assert answer.headers["server-timing"]


async def test_unknown_fields_are_ignored_unless_requests_are_strict(embedding: Served, config, scripted):
    assert (await embedding.http.post("/embed", json={"inputs": "hello", "poem": 1})).status_code == 200
    strict = attrs.evolve(config, network=attrs.evolve(config.network, strict_requests=True))
    async with serving(strict) as served:
        assert await served.refused("/embed", inputs="hello", poem=1) == (422, "Validation")
        known = {"normalize": True, "truncate": True, "truncation_direction": "Left", "prompt_name": "query"}
        await served.ok("/embed", inputs="hello", dimensions=3, model=None, **known)
