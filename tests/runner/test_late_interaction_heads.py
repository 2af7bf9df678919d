"""Between its two stages a query's vectors live on the device, and no longer than their request."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.models.model_families import ServedModel
from tests.models.retrieval_families import DOCUMENTS, WIDTH, colbert_v2, some_tokens_only
from trio_pool_serve.errors import QueryGoneError
from trio_pool_serve.runner.heads.maxsim import max_sim
from trio_pool_serve.runner.row_states import RowStates
from trio_pool_serve.types import Batch, HeldQuery, HoldQuery, MaxSim, QueryScope, TokenEmbed, Vectors


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    return ServedModel(colbert_v2(tmp_path_factory.mktemp("colbert") / "model"))


async def hold(served: ServedModel, scope: QueryScope, text: str = "who owns a task?") -> HeldQuery:
    query = HeldQuery(scope)
    await served.values([text], HoldQuery(query), input_type="query")
    return query


async def scores(served: ServedModel, queries: Sequence[HeldQuery]) -> list[float]:
    """Score a document against each query, all in one batch."""
    requests = await served.ask([DOCUMENTS[0]] * len(queries), [(MaxSim(query),) for query in queries], "document")
    return [float(score) for ((score,),) in await served.runner.launch(Batch(tuple(requests)))]


async def test_a_score_is_the_sum_of_the_best_matches(served: ServedModel):
    scope = served.runner.open_scope()
    [score] = await scores(served, [await hold(served, scope)])
    scope.close()
    [(query,)] = await served.values(["who owns a task?"], TokenEmbed(), input_type="query")
    [(document,)] = await served.values([DOCUMENTS[0]], TokenEmbed(), input_type="document")
    assert score == pytest.approx(sum(max(row @ other for other in document) for row in query), abs=1e-4)


async def test_what_is_held_is_counted_until_each_scope_is_closed(served: ServedModel):
    first, second = served.runner.open_scope(), served.runner.open_scope()
    await hold(served, first)
    of_one = served.runner.held_bytes
    assert of_one == 14 * WIDTH * 4
    await hold(served, first)
    await hold(served, second)
    assert served.runner.held_bytes == 3 * of_one
    first.close()
    assert served.runner.held_bytes == of_one
    first.close()
    second.close()
    assert served.runner.held_bytes == 0


async def test_a_query_that_is_computed_again_is_held_once(served: ServedModel):
    scope = served.runner.open_scope()
    query = HeldQuery(scope)
    for _ in range(2):
        await served.values(["who?"], HoldQuery(query), input_type="query")
    assert served.runner.held_bytes == 14 * WIDTH * 4
    scope.close()
    assert served.runner.held_bytes == 0


async def test_vectors_that_arrive_after_the_scope_is_closed_are_let_go(served: ServedModel):
    scope = served.runner.open_scope()
    scope.close()
    await hold(served, scope)
    assert served.runner.held_bytes == 0


async def test_a_scope_closed_between_the_stages_leaves_the_others_their_scores(served: ServedModel):
    gone, alive = served.runner.open_scope(), served.runner.open_scope()
    queries = [await hold(served, gone), await hold(served, alive)]
    both = await scores(served, queries)
    gone.close()
    missing, kept = await scores(served, queries)
    alive.close()
    assert np.isnan(missing)
    assert kept == both[1]


async def test_a_query_that_was_never_held_is_an_error(served: ServedModel):
    scope = served.runner.open_scope()
    with pytest.raises(QueryGoneError):
        await scores(served, [HeldQuery(scope)])
    scope.close()


async def test_queries_of_several_requests_are_scored_in_one_batch(served: ServedModel):
    scopes = [served.runner.open_scope() for _ in range(3)]
    texts = ("who?", "what is blocked?", "how many clients?")
    queries = [await hold(served, scope, text) for scope, text in zip(scopes, texts, strict=True)]
    together = await scores(served, [queries[index] for index in (2, 0, 1, 0)])
    alone = [(await scores(served, [queries[index]]))[0] for index in (2, 0, 1, 0)]
    assert together == pytest.approx(alone, abs=1e-4)
    assert len(set(alone)) == 3
    for scope in scopes:
        scope.close()


async def test_a_document_without_a_token_that_counts_has_no_vectors_and_the_least_score(tmp_path: Path):
    served = ServedModel(some_tokens_only(tmp_path / "model"))
    [(vectors,)] = await served.values([". ."], TokenEmbed(), input_type="document")
    assert vectors.shape == (0, WIDTH)
    scope = served.runner.open_scope()
    query = await hold(served, scope)
    requests = await served.ask([". ."], [(MaxSim(query),)], "document")
    [((score,),)] = await served.runner.launch(Batch(tuple(requests)))
    [(vectors,)] = await served.values(["who owns a task?"], TokenEmbed(), input_type="query")
    scope.close()
    assert score == pytest.approx(-1e9 / len(vectors))


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
