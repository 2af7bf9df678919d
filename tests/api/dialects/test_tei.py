"""TEI's routes; the runner is scripted, so every answer is known.

What TEI documents of each route, field and status is shown on real models in tests/compatibility/test_against_tei.py.
"""

from tests.api.dialects.tei_models import Served, serving
from tests.api.scripted_models import LateInteraction, ids_of, vector_of
from tests.tables import each
from trio_pool_serve.types import Classify, Embed, TokenEmbed

# -- what is read ----------------------------------------------------------------------------------------


async def test_token_vectors_keep_the_model_s_own_length_unless_asked_otherwise(embedding: Served):
    for given in ({}, {"normalize": True}, {"normalize": False}, {"dimensions": 3}):
        await embedding.ask("/embed_all", inputs="hello", **given)
    assert embedding.params == [
        TokenEmbed(),
        TokenEmbed(normalize=True),
        TokenEmbed(normalize=False),
        TokenEmbed(dimensions=3),
    ]


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


# -- POST / ---------------------------------------------------------------------------------------------


async def test_options_are_read_from_the_body_and_from_its_parameters(embedding: Served):
    query = [vector_of(ids_of("query : hello"), 3)]
    options = {"prompt_name": "query", "dimensions": 3, "normalize": False}
    assert await embedding.ask("/", inputs="hello", **options) == query
    assert await embedding.ask("/", inputs="hello", parameters=options) == query
    assert await embedding.ask("/", inputs="hello", parameters={"prompt_name": "passage"}, **options) == query
    assert set(embedding.params) == {Embed(dimensions=3, normalize=False)}


@each("more", [{"raw_scores": True}, {"parameters": {"raw_scores": True}}])
async def test_labels_and_ranks_may_be_logits(classifying: Served, judging: Served, more):
    await classifying.ask("/", inputs="hello", **more)
    await judging.ask("/", query="hello", texts=["w1"], **more)
    assert classifying.params[-1] == judging.params[-1] == Classify("raw")


async def test_vectors_are_normalised_unless_they_are_of_tokens(embedding: Served, config):
    await embedding.ask("/", inputs="hello")
    assert embedding.params == [Embed(normalize=True)]
    async with serving(config, LateInteraction()) as served:
        await served.ask("/", inputs=[7, 8])
        await served.ask("/", inputs=[7], parameters={"normalize": True})
        assert served.params == [TokenEmbed(), TokenEmbed(normalize=True)]


# -- what is refused -------------------------------------------------------------------------------------


@each("inputs", [[1.5], [True], ["hello", 5], [5, [5]], [[[5]]], [["hello"]], [5, -1], [[5], [100_000]], [10**30]])
@each("path", ["/embed", "/embed_all"])
async def test_inputs_that_cannot_be_embedded_are_422(embedding: Served, path, inputs):
    assert await embedding.refused(path, inputs=inputs) == (422, "Validation")


@each("inputs", [["a", "b", "c"], [["a", "b", "c"]], ["a", ["b"]], [["a"], "b"], [5], [[5]]])
@each("path", ["/predict", "/"])
async def test_inputs_that_cannot_be_classified_are_422(classifying: Served, path, inputs):
    assert await classifying.refused(path, inputs=inputs) == (422, "Validation")


@each(
    ("path", "name", "values"),
    [
        *((path, "inputs", [[], [[]], [[5], []], "", [""], ["hello", ""]]) for path in ("/embed", "/embed_all", "/")),
        ("/predict", "inputs", [[], [[]], [["a"], []], "", [[""]], [["a"], [""]], ["", ""], [["", ""]]]),
        *((path, "inputs", [{"source_sentence": "hello", "sentences": []}]) for path in ("/similarity", "/")),
        ("/tokenize", "inputs", [[], "", ["a", ""]]),
        ("/decode", "ids", [[], [[]]]),
    ],
)
async def test_nothing_to_do_is_empty(embedding: Served, path, name, values):
    for value in values:
        assert await embedding.refused(path, **{name: value}) == (400, "Empty"), value
