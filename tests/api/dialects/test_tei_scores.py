"""TEI's routes for labels and scores; the runner is scripted, so every answer is known."""

import numpy as np
import pytest

from tests.api.dialects.tei_models import Classifying, Judging, Served, serving
from tests.api.scripted_models import LONG, Judge, LateInteraction, ids_of, vector_of
from tests.model_folders import VOCABULARY
from tests.tables import each
from trio_pool_serve.types import Classify, CopiedBatch


@pytest.fixture
async def classifying(config):
    async with serving(config, Classifying(), labels=3) as served:
        yield served


@pytest.fixture
async def judging(config):
    async with serving(config, Judging(), labels=1) as served:
        yield served


@pytest.fixture
async def embedding(config):
    async with serving(config) as served:
        yield served


def labelled(ids: list[int]) -> list[dict]:
    """Length, sum and first id, by the names that the model and transformers have for them."""
    numbers = {"short": len(ids), "heavy": sum(ids), "LABEL_2": ids[0]}
    best_first = sorted(numbers, key=lambda name: -numbers[name])
    return [{"score": numbers[name], "label": name} for name in best_first]


# -- /predict --------------------------------------------------------------------------------------------


async def test_a_single_text_has_its_labels_best_first(classifying: Served):
    assert await classifying.ask("/predict", inputs="hello world") == labelled(ids_of("hello world"))
    assert await classifying.ask("/predict", inputs=["hello world"]) == labelled(ids_of("hello world"))


async def test_a_list_of_two_texts_is_a_pair(classifying: Served):
    answer = await classifying.ask("/predict", inputs=["hello", "world"])
    (row,) = [request.prompt for batch in classifying.runner.batches for request in batch.requests]
    ids = row.token_ids.tolist()
    assert [token for token in ids if token >= VOCABULARY["w0"]] == [VOCABULARY["hello"], VOCABULARY["world"]]
    assert answer == labelled(ids)


async def test_a_list_of_lists_is_a_batch(classifying: Served):
    first, second, pair = await classifying.ask("/predict", inputs=[["hello"], ["w1 w2"], ["hello", "world"]])
    assert first == labelled(ids_of("hello"))
    assert second == labelled(ids_of("w1 w2"))
    (alone,) = await classifying.ask("/predict", inputs=[["hello", "world"]])
    assert pair == alone


async def test_scores_are_probabilities_unless_they_are_wanted_raw(classifying: Served):
    for raw_scores in (None, False, True):
        await classifying.ask("/predict", inputs="hello", raw_scores=raw_scores)
    await classifying.ask("/predict", inputs="hello")
    assert classifying.params == [
        Classify("probabilities"), Classify("probabilities"), Classify("raw"), Classify("probabilities")
    ]  # fmt: skip


async def test_a_model_without_names_for_its_labels_numbers_them(config):
    async with serving(config, Classifying(labels=()), labels=1) as served:
        assert await served.ask("/predict", inputs="hello") == [{"score": 3, "label": "LABEL_0"}]


async def test_texts_to_classify_are_read_as_any(classifying: Served):
    null = dict.fromkeys(["model", "truncate", "truncation_direction", "prompt_name", "raw_scores"])
    assert await classifying.ask("/predict", inputs="hello", **null) == labelled(ids_of("hello"))
    assert await classifying.ask("/predict", inputs="hello", prompt_name="query") == labelled(ids_of("query : hello"))
    words = LONG.split()
    assert await classifying.ask("/predict", inputs=LONG) == labelled(ids_of(" ".join(words[:62])))
    found = await classifying.ask("/predict", inputs=LONG, truncation_direction="left")
    assert found == labelled(ids_of(" ".join(words[-62:])))
    assert await classifying.refused("/predict", inputs=LONG, truncate=False) == (422, "Validation")


@each(
    "body",
    [
        {},
        {"inputs": None},
        {"inputs": 5},
        {"inputs": [5]},
        {"inputs": {}},
        {"inputs": ["a", "b", "c"]},
        {"inputs": [["a", "b", "c"]]},
        {"inputs": ["a", ["b"]]},
        {"inputs": [["a"], "b"]},
        {"inputs": [[["a"]]]},
        {"inputs": [["a"]] * 2049},
        {"inputs": "a", "raw_scores": "yes"},
        {"inputs": "a", "truncate": "yes"},
        {"inputs": "a", "truncation_direction": "up"},
        {"inputs": "a", "prompt_name": "poem"},
    ],
)
async def test_what_cannot_be_classified_is_422(classifying: Served, body):
    assert await classifying.refused("/predict", **body) == (422, "Validation")


@pytest.mark.parametrize("inputs", [[], [[]], [["a"], []], "", [[""]], [["a"], [""]], ["", ""], [["", ""]]])
async def test_nothing_to_classify_is_empty(classifying: Served, inputs):
    assert await classifying.refused("/predict", inputs=inputs) == (400, "Empty")


# -- /rerank ---------------------------------------------------------------------------------------------


async def test_texts_are_ranked_by_a_model_that_reads_pairs(judging: Served):
    texts = ["w1", "w1 w2 w3", "w1 w2"]
    ranks = await judging.ask("/rerank", query="hello", texts=texts)
    assert [list(rank) for rank in ranks] == [["index", "score"]] * 3
    assert [rank["index"] for rank in ranks] == [1, 2, 0]
    lengths = [rank["score"] for rank in ranks]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] - lengths[2] == 2


async def test_texts_come_back_when_they_are_wanted(judging: Served):
    texts = ["w1", "w1 w2 w3"]
    for raw_scores in (True, False):
        ranks = await judging.ask("/rerank", query="hello", texts=texts, return_text=True, raw_scores=raw_scores)
        assert [(rank["index"], rank["text"]) for rank in ranks] == [(1, texts[1]), (0, texts[0])]
    assert "text" not in (await judging.ask("/rerank", query="hello", texts=texts, return_text=None))[0]


async def test_scores_are_activated_unless_they_are_wanted_raw(judging: Served):
    for given in ({}, {"raw_scores": None}, {"raw_scores": False}, {"raw_scores": True}):
        await judging.ask("/rerank", query="hello", texts=["w1"], **given)
    assert judging.params == [Classify("score"), Classify("score"), Classify("score"), Classify("raw")]


async def test_equal_texts_keep_their_order(judging: Served):
    ranks = await judging.ask("/rerank", query="hello", texts=["w1", "w2", "w3"])
    assert [rank["index"] for rank in ranks] == [0, 1, 2]


async def test_late_interaction_ranks_too(config):
    async with serving(config, LateInteraction()) as served:
        ranks = await served.ask("/rerank", query="w1 w2", texts=["w5", "w1 w2", "w2"], return_text=True)
        # Counts the query's tokens that the text has, [CLS] and [SEP] among them.
        assert ranks == [
            {"index": 1, "score": 4.0, "text": "w1 w2"},
            {"index": 2, "score": 3.0, "text": "w2"},
            {"index": 0, "score": 2.0, "text": "w5"},
        ]


def cosine(first: list[int], second: list[int]) -> float:
    one, other = np.array(vector_of(first)), np.array(vector_of(second))
    return float(one @ other / np.linalg.norm(one) / np.linalg.norm(other))


async def test_vectors_rank_too(embedding: Served):
    texts = ["w1", "w1 w2 w3 w4 w5"]
    ranks = await embedding.ask("/rerank", query="w1 w2 w3 w4", texts=texts)
    query = ids_of("query : w1 w2 w3 w4")
    scores = {rank["index"]: rank["score"] for rank in ranks}
    assert scores == pytest.approx({index: cosine(query, ids_of(text)) for index, text in enumerate(texts)}, abs=1e-5)
    assert [rank["score"] for rank in ranks] == sorted(scores.values(), reverse=True)


async def test_the_pair_is_cut_unless_asked_otherwise(judging: Served):
    for given in ({}, {"truncate": None}, {"truncate": True}, {"truncate": True, "truncation_direction": "Left"}):
        assert (await judging.ask("/rerank", query="hello", texts=[LONG], **given))[0]["score"] == 64
    assert await judging.refused("/rerank", query="hello", texts=[LONG, "w1"], truncate=False) == (422, "Validation")


async def test_large_rankings_come_back_whole(judging: Served):
    texts = [" ".join(["w1"] * (n % 40 + 1)) for n in range(300)]
    ranks = await judging.ask("/rerank", query="hello", texts=texts, return_text=True)
    assert sorted(rank["index"] for rank in ranks) == list(range(300))
    assert all(rank["text"] == texts[rank["index"]] for rank in ranks)


@each(
    "body",
    [
        {"texts": ["w1"]},
        {"query": 5, "texts": ["w1"]},
        {"query": None, "texts": ["w1"]},
        {"query": "hello", "texts": None},
        {"query": "hello", "texts": "w1"},
        {"query": "hello", "texts": [5]},
        {"query": "hello", "texts": [{"text": "w1"}]},
        {"query": "hello", "texts": ["w1"] * 2049},
        {"query": "hello", "texts": ["w1"], "raw_scores": 2},
        {"query": "hello", "texts": ["w1"], "return_text": "no"},
        {"query": "hello", "texts": ["w1"], "truncation_direction": "both"},
    ],
)
async def test_what_cannot_be_ranked_is_422(judging: Served, body):
    assert await judging.refused("/rerank", **body) == (422, "Validation")


async def test_nothing_to_rank_is_empty(judging: Served):
    assert await judging.refused("/rerank", query="hello", texts=[]) == (400, "Empty")


async def test_a_score_that_is_no_number_is_the_backend_s_fault(judging: Served):
    nan = np.array([np.nan], dtype=np.float32)
    judging.runner.on_launch = lambda batch: CopiedBatch([(nan,)] * len(batch.requests))
    assert await judging.refused("/rerank", query="hello", texts=["w1"]) == (424, "Backend")
    assert await judging.refused("/predict", inputs="hello") == (424, "Backend")
    inputs = {"source_sentence": "hello", "sentences": ["w1"]}
    assert await judging.refused("/similarity", inputs=inputs) == (424, "Backend")


# -- /similarity -----------------------------------------------------------------------------------------


async def test_similarity_answers_a_number_per_sentence_in_order(embedding: Served):
    sentences = ["w1 w2", "w1", "w1 w2 w3 w4 w5"]
    found = await embedding.ask("/similarity", inputs={"source_sentence": "w1 w2", "sentences": sentences})
    expected = [cosine(ids_of("w1 w2"), ids_of(sentence)) for sentence in sentences]
    assert found == pytest.approx(expected, abs=1e-5)
    assert found[0] == pytest.approx(1)


async def test_both_sides_of_a_similarity_are_read_alike(embedding: Served):
    inputs = {"source_sentence": "w1", "sentences": ["w1"]}
    for parameters in (None, {}, {"prompt_name": "query"}):
        assert await embedding.ask("/similarity", inputs=inputs, parameters=parameters) == [pytest.approx(1)]
    read = [request.prompt.token_ids.tolist() for batch in embedding.runner.batches for request in batch.requests]
    assert read == [ids_of("w1")] * 4 + [ids_of("query : w1")] * 2


async def test_a_similarity_s_parameters_say_how_to_read(embedding: Served):
    inputs = {"source_sentence": "hello", "sentences": [LONG]}
    assert await embedding.refused("/similarity", inputs=inputs, parameters={"truncate": False}) == (422, "Validation")
    for parameters in ({"truncate": True, "truncation_direction": "Left"}, {"truncate": None}):
        assert len(await embedding.ask("/similarity", inputs=inputs, parameters=parameters)) == 1
    wrong = {"truncation_direction": "up"}
    assert await embedding.refused("/similarity", inputs=inputs, parameters=wrong) == (422, "Validation")


@each(
    "inputs",
    [
        None, "hello", ["hello"], {}, {"source_sentence": "hello"}, {"sentences": ["hello"]},
        {"source_sentence": 5, "sentences": ["hello"]}, {"source_sentence": "hello", "sentences": "hello"},
        {"source_sentence": "hello", "sentences": ["hello"] * 2049},
    ],
)  # fmt: skip
async def test_what_cannot_be_compared_is_422(embedding: Served, inputs):
    assert await embedding.refused("/similarity", inputs=inputs) == (422, "Validation")


async def test_nothing_to_compare_with_is_empty(embedding: Served):
    inputs = {"source_sentence": "hello", "sentences": []}
    assert await embedding.refused("/similarity", inputs=inputs) == (400, "Empty")


async def test_a_model_that_only_ranks_can_compare(config):
    async with serving(config, Judge(), labels=1) as served:
        inputs = {"source_sentence": "hello", "sentences": ["w1", "w1 w2"]}
        shorter, longer = await served.ask("/similarity", inputs=inputs)
        assert longer == shorter + 1
