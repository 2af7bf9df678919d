"""TEI's routes for vectors and tokens; the runner is scripted, so every answer is known."""

import attrs
import pytest

from tests.api.dialects.tei_models import Served, Sparse, serving
from tests.api.scripted_models import LONG, LateInteraction, ids_of, vector_of
from tests.model_folders import VOCABULARY
from tests.tables import each
from trio_pool_serve.types import Embed, TokenEmbed

FORMS = [
    ("hello", [ids_of("hello")]),
    (["hello", "world world"], [ids_of("hello"), ids_of("world world")]),
    ([7, 8, 9], [[7, 8, 9]]),
    ([[7, 8], [9]], [[7, 8], [9]]),
]
FORM_NAMES = ["text", "texts", "ids", "lists of ids"]


@pytest.fixture
async def embedding(config):
    async with serving(config) as served:
        yield served


@pytest.fixture
async def sparse(config):
    async with serving(config, Sparse()) as served:
        yield served


@pytest.fixture
async def late(config):
    async with serving(config, LateInteraction()) as served:
        yield served


# -- /embed ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("inputs", "expected"), FORMS, ids=FORM_NAMES)
async def test_embed_answers_a_bare_list_of_vectors(embedding: Served, inputs, expected):
    assert await embedding.ask("/embed", inputs=inputs) == [vector_of(ids) for ids in expected]


async def test_vectors_have_unit_length_unless_asked_otherwise(embedding: Served):
    for normalize in (None, True, False):
        await embedding.ask("/embed", inputs="hello", normalize=normalize)
    await embedding.ask("/embed", inputs="hello")
    assert embedding.params == [Embed(normalize=wanted) for wanted in (True, True, False, True)]


async def test_dimensions_cut_the_vector(embedding: Served):
    assert await embedding.ask("/embed", inputs="hello", dimensions=3) == [vector_of(ids_of("hello"), 3)]


async def test_null_stands_for_not_given(embedding: Served):
    names = ["model", "truncate", "truncation_direction", "prompt_name", "normalize", "dimensions"]
    assert await embedding.ask("/embed", inputs="hello", **dict.fromkeys(names)) == [vector_of(ids_of("hello"))]


async def test_the_model_may_be_named(embedding: Served, config):
    assert await embedding.ask("/embed", inputs="hello", model=config.models[0]) == [vector_of(ids_of("hello"))]


async def test_prompts_go_in_front_of_texts(embedding: Served):
    assert await embedding.ask("/embed", inputs="hello", prompt_name="query") == [vector_of(ids_of("query : hello"))]


async def test_what_is_too_long_is_cut_unless_asked_otherwise(embedding: Served):
    for given in ({}, {"truncate": None}, {"truncate": True}):
        ((length, *_),) = await embedding.ask("/embed", inputs=LONG, **given)
        assert length == 64
    assert await embedding.refused("/embed", inputs=LONG, truncate=False) == (422, "Validation")


async def test_the_setting_says_whether_to_cut_where_the_client_does_not(config, scripted):
    strict = attrs.evolve(config, loading=attrs.evolve(config.loading, long_text="refuse"))
    async with serving(strict) as served:
        assert await served.refused("/embed", inputs=LONG) == (422, "Validation")
        assert await served.refused("/embed", inputs=LONG, truncate=None) == (422, "Validation")
        ((length, *_),) = await served.ask("/embed", inputs=LONG, truncate=True)
        assert length == 64


@pytest.mark.parametrize("direction", ["Right", "right", None, "Left", "left", "LEFT"])
async def test_the_side_that_is_cut_is_named_in_any_case(embedding: Served, direction):
    ids = [n % 200 + 5 for n in range(100)]
    kept = ids[-64:] if (direction or "").lower() == "left" else ids[:64]
    found = await embedding.ask("/embed", inputs=ids, truncate=True, truncation_direction=direction)
    assert found == [vector_of(kept)]


async def test_the_batch_that_llama_index_sends_is_answered(embedding: Served):
    assert await embedding.ask("/embed", inputs=["hello", "world"], truncate=True) == [
        vector_of(ids_of("hello")),
        vector_of(ids_of("world")),
    ]


async def test_large_answers_keep_their_order(embedding: Served):
    inputs = [[n % 200 + 5] for n in range(700)]
    assert await embedding.ask("/embed", inputs=inputs) == [vector_of(ids) for ids in inputs]


# -- /embed_all, /embed_sparse ---------------------------------------------------------------------------


@pytest.mark.parametrize(("inputs", "expected"), FORMS, ids=FORM_NAMES)
async def test_embed_all_answers_a_vector_per_token(late: Served, inputs, expected):
    assert await late.ask("/embed_all", inputs=inputs) == [[vector_of([token]) for token in ids] for ids in expected]


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


@pytest.mark.parametrize(("inputs", "expected"), FORMS, ids=FORM_NAMES)
async def test_embed_sparse_answers_indices_and_values(sparse: Served, inputs, expected):
    found = await sparse.ask("/embed_sparse", inputs=inputs)
    assert found == [[{"index": index, "value": ids.count(index)} for index in sorted(set(ids))] for ids in expected]
    assert all(isinstance(entry["value"], float) for row in found for entry in row)


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


def special(name: str) -> dict:
    return {"id": VOCABULARY[name], "text": name, "special": True, "start": None, "stop": None}


def word(text: str, start: int) -> dict:
    return {"id": VOCABULARY[text], "text": text, "special": False, "start": start, "stop": start + len(text)}


async def test_tokenize_says_where_each_token_comes_from(embedding: Served):
    hello = [special("[CLS]"), word("hello", 0), word("world", 6), special("[SEP]")]
    assert await embedding.ask("/tokenize", inputs="hello world") == [hello]
    assert await embedding.ask("/tokenize", inputs=["hello world", "w7"], add_special_tokens=False) == [
        hello[1:-1],
        [word("w7", 0)],
    ]


async def test_tokenize_counts_bytes(embedding: Served):
    (tokens,) = await embedding.ask("/tokenize", inputs="é hello 日本 world")
    known = [token for token in tokens if token["text"] in ("hello", "world")]
    assert known == [word("hello", 3), word("world", 16)]
    (tokens,) = await embedding.ask("/tokenize", inputs="é hello", prompt_name="query")
    assert tokens[-2] == word("hello", len("query : é ".encode()))


async def test_tokenize_reads_null_as_not_given(embedding: Served):
    given = dict.fromkeys(["model", "add_special_tokens", "prompt_name"])
    (tokens,) = await embedding.ask("/tokenize", inputs="hello", **given)
    assert [token["id"] for token in tokens] == ids_of("hello")


async def test_tokenize_puts_the_prompt_in_front(embedding: Served):
    (tokens,) = await embedding.ask("/tokenize", inputs="hello", prompt_name="query")
    assert [token["id"] for token in tokens] == ids_of("query : hello")


async def test_tokenize_cuts_nothing(embedding: Served):
    (tokens,) = await embedding.ask("/tokenize", inputs=LONG)
    assert len(tokens) == 102


async def test_decode_is_the_way_back(embedding: Served):
    ids = ids_of("hello world")
    assert await embedding.ask("/decode", ids=ids) == ["hello world"]
    assert await embedding.ask("/decode", ids=[ids, ids[1:2]], skip_special_tokens=None) == ["hello world", "hello"]
    (whole,) = await embedding.ask("/decode", ids=ids, skip_special_tokens=False)
    assert whole == "[CLS] hello world [SEP]"


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
