"""TEI's routes for labels and scores; the runner is scripted, so every answer is known."""

import numpy as np
import pytest

from tests.api.dialects.tei_models import Classifying, Served, serving
from tests.api.scripted_models import Judge, LateInteraction, ids_of, vector_of
from tests.tables import each
from trio_pool_serve.types import CopiedBatch

# -- /predict --------------------------------------------------------------------------------------------


async def test_a_model_without_names_for_its_labels_numbers_them(config):
    async with serving(config, Classifying(labels=()), labels=1) as served:
        assert await served.ask("/predict", inputs="hello") == [{"score": 3, "label": "LABEL_0"}]


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
