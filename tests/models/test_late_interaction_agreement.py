"""Token vectors and MaxSim scores are those of sentence-transformers, whatever layout the folder has."""

import random
from typing import Any

import numpy as np
import pytest
import torch
from attrs import frozen

from tests.models.model_families import ServedModel
from tests.models.retrieval_families import DOCUMENTS, LATE_INTERACTION, QUERIES, assert_same_ranking
from trio_pool_serve.prompts import InputType
from trio_pool_serve.types import Batch, MaxSim, TokenEmbed, Vectors

TOLERANCE = 1e-5
SCORE_TOLERANCE = 1e-4


@frozen(eq=False)
class Pair:
    """One folder, loaded here and there, with what the oracle makes of the texts."""

    ours: ServedModel
    theirs: Any
    queries: list[Vectors]
    documents: list[Vectors]
    scores: Vectors


@pytest.fixture(scope="module", params=LATE_INTERACTION)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    from sentence_transformers import MultiVectorEncoder

    path = LATE_INTERACTION[request.param](tmp_path_factory.mktemp("late") / request.param)
    theirs = MultiVectorEncoder(str(path), device="cpu", local_files_only=True)
    queries, documents = theirs.encode_query(list(QUERIES)), theirs.encode_document(list(DOCUMENTS))
    scores = theirs.similarity(queries, documents).numpy()
    return Pair(ServedModel(path), theirs, to_numpy(queries), to_numpy(documents), scores)


def to_numpy(tensors: list[torch.Tensor]) -> list[Vectors]:
    return [tensor.numpy() for tensor in tensors]


def assert_agree(ours: list[Vectors], theirs: list[Vectors]) -> None:
    assert [vectors.shape for vectors in ours] == [vectors.shape for vectors in theirs]
    assert all(np.abs(a - b).max(initial=0) < TOLERANCE for a, b in zip(ours, theirs, strict=True))


async def vectors(served: ServedModel, texts: tuple[str, ...], input_type: InputType | None) -> list[Vectors]:
    return [value for (value,) in await served.values(texts, TokenEmbed(), input_type=input_type)]


async def test_a_text_alone_agrees(pair: Pair):
    assert_agree([(await vectors(pair.ours, (text,), "query"))[0] for text in QUERIES], pair.queries)
    assert_agree([(await vectors(pair.ours, (text,), "document"))[0] for text in DOCUMENTS], pair.documents)


async def test_queries_and_documents_in_one_shuffled_batch_agree(pair: Pair):
    queries = await pair.ours.ask(QUERIES, [(TokenEmbed(),)] * len(QUERIES), "query")
    documents = await pair.ours.ask(DOCUMENTS, [(TokenEmbed(),)] * len(DOCUMENTS), "document")
    expected = list(zip(queries + documents, pair.queries + pair.documents, strict=True)) * 2
    random.Random(7).shuffle(expected)
    rows = await pair.ours.runner.launch(Batch(tuple(request for request, _ in expected)))
    assert_agree([row for (row,) in rows], [wanted for _, wanted in expected])


async def test_a_text_without_a_role_agrees(pair: Pair):
    assert_agree(await vectors(pair.ours, DOCUMENTS, None), to_numpy(pair.theirs.encode(list(DOCUMENTS))))


async def two_stages(served: ServedModel) -> Vectors:
    """All queries against all documents, each stage in one batch."""
    queries = [MaxSim(query) for query in await vectors(served, QUERIES, "query")]
    documents = await served.ask(
        DOCUMENTS * len(QUERIES), [(query,) for query in queries for _ in DOCUMENTS], "document"
    )
    rows = await served.runner.launch(Batch(tuple(documents)))
    return np.array([score for ((score,),) in rows]).reshape(len(QUERIES), len(DOCUMENTS))


async def test_scores_and_their_ranking_agree(pair: Pair):
    scores = await two_stages(pair.ours)
    assert np.abs(scores - pair.scores).max() < SCORE_TOLERANCE
    assert_same_ranking(scores, pair.scores)


def test_the_prompts_are_those_of_sentence_transformers(pair: Pair):
    theirs = {name: text for name, text in pair.theirs.prompts.items() if text is not None}
    assert pair.ours.folder.prompts == theirs


def test_the_runner_knows_its_dimensions(pair: Pair):
    assert pair.ours.runner.dimensions == pair.documents[0].shape[1]
