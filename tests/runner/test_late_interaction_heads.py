"""Documents are scored against the vectors of queries that their params carry."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.models.model_families import ServedModel
from tests.models.retrieval_families import DOCUMENTS, WIDTH, colbert_v2, some_tokens_only
from trio_pool_serve.runner.heads.maxsim import max_sim
from trio_pool_serve.runner.row_states import RowStates
from trio_pool_serve.types import Batch, MaxSim, TokenEmbed, Vectors


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    return ServedModel(colbert_v2(tmp_path_factory.mktemp("colbert") / "model"))


async def query_of(served: ServedModel, text: str = "who owns a task?") -> MaxSim:
    [(vectors,)] = await served.values([text], TokenEmbed(), input_type="query")
    return MaxSim(vectors)


async def scores(served: ServedModel, queries: Sequence[MaxSim]) -> list[float]:
    """Score a document against each query, all in one batch."""
    requests = await served.ask([DOCUMENTS[0]] * len(queries), [(query,) for query in queries], "document")
    return [float(score) for ((score,),) in await served.runner.launch(Batch(tuple(requests)))]


async def test_a_score_is_the_sum_of_the_best_matches(served: ServedModel):
    query = await query_of(served)
    [score] = await scores(served, [query])
    [(document,)] = await served.values([DOCUMENTS[0]], TokenEmbed(), input_type="document")
    assert score == pytest.approx(sum(max(row @ other for other in document) for row in query.query), abs=1e-4)


async def test_queries_of_several_requests_are_scored_in_one_batch(served: ServedModel):
    queries = [await query_of(served, text) for text in ("who?", "what is blocked?", "how many clients?")]
    together = await scores(served, [queries[index] for index in (2, 0, 1, 0)])
    alone = [(await scores(served, [queries[index]]))[0] for index in (2, 0, 1, 0)]
    assert together == pytest.approx(alone, abs=1e-4)
    assert len(set(alone)) == 3


async def test_a_query_that_cannot_be_changed_is_scored(served: ServedModel):
    """As one from the cache of results."""
    query = await query_of(served)
    frozen = MaxSim(query.query.copy())
    frozen.query.setflags(write=False)
    assert frozen == query
    assert await scores(served, [frozen]) == await scores(served, [query])


async def test_a_document_without_a_token_that_counts_has_no_vectors_and_the_least_score(tmp_path: Path):
    served = ServedModel(some_tokens_only(tmp_path / "model"))
    [(vectors,)] = await served.values([". ."], TokenEmbed(), input_type="document")
    assert vectors.shape == (0, WIDTH)
    query = await query_of(served)
    requests = await served.ask([". ."], [(query,)], "document")
    [((score,),)] = await served.runner.launch(Batch(tuple(requests)))
    assert score == pytest.approx(-1e9 / len(query.query))


async def test_token_vectors_are_cut_before_they_are_normalised(served: ServedModel):
    def unit(rows: Vectors) -> Vectors:
        return rows / np.linalg.norm(rows, axis=-1, keepdims=True)

    requests = await served.ask(
        [DOCUMENTS[0]] * 3,
        [(TokenEmbed(),), (TokenEmbed(dimensions=8),), (TokenEmbed(dimensions=8, normalize=False),)],
        "document",
    )
    (whole,), (cut,), (raw,) = await served.runner.launch(Batch(tuple(requests)))
    assert cut.shape == (len(whole), 8)
    assert np.abs(cut - unit(whole[:, :8])).max() < 1e-5
    assert np.abs(unit(raw) - cut).max() < 1e-5
    assert np.abs(np.linalg.norm(raw, axis=-1) - 1).max() > 0.1


def test_tokens_that_do_not_count_match_nothing():
    query = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    vectors = torch.tensor([[-1.0, -2.0], [3.0, 0.0], [0.0, 4.0]])
    documents = RowStates(vectors, np.array([0, 1, 3]), np.array([1, 2, 0]))
    assert max_sim(query, documents).tolist() == [-3.0, 7.0, -1e9]
