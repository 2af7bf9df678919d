"""Scoring, in each of the three ways that models compare two texts."""

import attrs
import numpy as np
import pytest
import trio

from tests.api.scripted_models import Dots, Judge, LateInteraction, serve_as
from tests.conftest import assert_idle, wait_idle
from tests.model_folders import VOCABULARY
from tests.tasks.scripted_jobs import ids_of, rows_of, scores
from trio_pool_serve.errors import (
    ContextLengthError,
    EmptyInputError,
    InvalidRequestError,
    NotFiniteError,
    OverloadedError,
)
from trio_pool_serve.models.token_pooling import TokenPooling
from trio_pool_serve.rendering.memory_budget import MemoryBudget, Reservation
from trio_pool_serve.tasks.input_params import InputParams
from trio_pool_serve.tasks.request_context import RequestContext
from trio_pool_serve.tasks.score import SIMILARITIES, ScoreJob, score
from trio_pool_serve.types import Classify, Client, CopiedBatch, MaxSim, TokenEmbed

pytestmark = pytest.mark.unit

# -- what a job may be --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("queries", "documents", "limits", "told"),
    [
        (0, 1, {}, "queries is empty"),
        (1, 0, {}, "documents is empty"),
        (2, 1, {}, "2 queries and 1 documents"),
        (2, 3, {}, "2 queries and 3 documents"),
        (1, 1, {"max_query_tokens": 0}, "max_query_tokens must be at least 1, not 0"),
        (1, 1, {"max_document_tokens": 0}, "max_document_tokens must be at least 1, not 0"),
    ],
)
def test_a_job_has_one_query_or_one_for_each_document_and_cuts_no_text_to_nothing(queries, documents, limits, told):
    with pytest.raises(InvalidRequestError, match=told) as caught:
        ScoreJob(queries=["q"] * queries, documents=["d"] * documents, **limits)
    assert isinstance(caught.value, EmptyInputError) == (not queries or not documents)


# -- pairs --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", [np.nan, np.inf])
async def test_what_is_no_number_is_an_error_and_no_score(service, scripted, wrong):
    serve_as(service, Judge())
    scripted.on_launch = lambda batch: CopiedBatch([(np.array([wrong], dtype=np.float32),)] * len(batch.requests))
    with pytest.raises(NotFiniteError):
        await scores(service, ["hello"], ["world"])


@pytest.mark.parametrize(("more", "activation"), [({}, "score"), ({"activation": "raw"}, "raw")])
async def test_pairs_are_read_together_and_scored_by_their_label(service, scripted, more, activation):
    scripted.labels = 1
    serve_as(service, Judge())
    found = await scores(service, ["hello"], ["world", "w1 w2"], **more)
    assert found.values.tolist() == [2, 3]  # this tokenizer has no special tokens for pairs
    assert found.values.dtype == np.float32
    assert found.prompt_tokens == found.values.sum()
    assert {row.params for row in rows_of(scripted)} == {(Classify(activation),)}
    assert_idle(service)


async def test_each_text_of_a_pair_is_cut_to_its_own_limit(service, scripted):
    scripted.labels = 1
    serve_as(service, Judge())
    found = await scores(service, ["w1 w2 w3"], ["w4 w5 w6"], max_query_tokens=1, max_document_tokens=2)
    (row,) = rows_of(scripted)
    assert {VOCABULARY["w1"], VOCABULARY["w4"], VOCABULARY["w5"]} <= set(row.prompt.token_ids.tolist())
    assert not {VOCABULARY["w2"], VOCABULARY["w6"]} & set(row.prompt.token_ids.tolist())
    assert found.prompt_tokens == len(row.prompt.token_ids)


@pytest.mark.parametrize("spec", [Judge(), Dots(), LateInteraction()])
async def test_a_text_that_is_too_long_is_refused_whole_unless_it_may_be_cut(service, scripted, spec):
    scripted.labels = 1
    serve_as(service, spec)
    with pytest.raises(ContextLengthError):
        await scores(service, ["hello"], ["short", "w1 " * 100])
    await wait_idle(service)
    await scores(service, ["hello"], ["w1 " * 100], input_params=InputParams(truncate_to=-1))
    assert max(row.tokens for row in rows_of(scripted)) == service.model().renderer.max_model_len


def test_a_query_is_admitted_as_often_as_it_is_read():
    job = ScoreJob(queries=["w1 " * 40], documents=["w2"] * 100)
    assert job.estimated_tokens(in_pairs=True) > 100 * 30 > job.estimated_tokens(in_pairs=False)


# -- vectors ------------------------------------------------------------------------------------------


async def test_one_query_is_embedded_once_for_all_documents(service, scripted):
    serve_as(service, Dots())
    found = await scores(service, ["hello"], ["world", "w1", "w2 w3"])
    assert len(rows_of(scripted)) == 4
    texts = ("query : hello", "world", "w1", "w2 w3")
    query, *documents = (np.array(ids_of(text)) for text in texts)

    def vector(ids):
        return np.array([len(ids), ids.sum(), ids[0], ids[-1]], dtype=np.float32)

    assert found.values.tolist() == [float(vector(query) @ vector(ids)) for ids in documents]
    assert found.prompt_tokens == sum(map(len, (query, *documents)))


async def test_as_many_queries_as_documents_are_scored_one_by_one(service):
    serve_as(service, Dots())
    each = await scores(service, ["hello", "w1 w2"], ["world", "w3"])
    alone = [await scores(service, [query], [text]) for query, text in (("hello", "world"), ("w1 w2", "w3"))]
    assert each.values.tolist() == [found.values[0] for found in alone]


async def test_each_side_is_cut_to_its_own_limit(service, scripted):
    serve_as(service, Dots())
    input_params = InputParams(instruction="")
    await scores(
        service, ["w1 " * 90], ["w2 " * 90], input_params=input_params, max_query_tokens=5, max_document_tokens=7
    )
    assert sorted(row.tokens for row in rows_of(scripted)) == [5 + 2, 7 + 2]


A, B = np.array([[3.0, 4.0]], dtype=np.float32), np.array([[4.0, 3.0], [0.0, 0.0]], dtype=np.float32)


@pytest.mark.parametrize("spec", [Judge(), Dots(), LateInteraction()])
async def test_equal_documents_have_equal_scores_and_are_computed_once(service, scripted, spec):
    serve_as(service, spec)
    if isinstance(spec, Judge):
        scripted.on_launch = lambda batch: CopiedBatch(
            [(row.prompt.token_ids[-2:].astype(np.float32)[:1],) for row in batch.requests]
        )
    documents = ["w1", "w2 w3"] * 30 + ["w4"]
    found = await scores(service, ["hello"], documents)
    queries = 0 if isinstance(spec, Judge) else 1
    assert len(rows_of(scripted)) == queries + 3
    each = [await scores(service, ["hello"], [text]) for text in documents[-3:]]
    by_text = dict(zip(documents[-3:], each, strict=True))
    assert found.values.tolist() == [by_text[text].values[0] for text in documents]
    of_query = len(ids_of("query : hello")) if queries else 0
    assert found.prompt_tokens == of_query + sum(by_text[text].prompt_tokens - of_query for text in documents)
    assert_idle(service)


@pytest.mark.parametrize("spec", [Judge(), Dots(), LateInteraction()])
async def test_equal_pairs_are_computed_once(service, scripted, spec):
    serve_as(service, spec)
    found = await scores(service, ["w1", "w2", "w1"], ["w3 w1", "w3 w1", "w3 w1"])
    assert np.array_equal(*np.split(found.values, 3)[::2])
    # A pair is one row; else there are two queries, and the document is compared with each.
    assert len(rows_of(scripted)) == {Judge: 2, Dots: 3, LateInteraction: 4}[type(spec)]


@pytest.mark.parametrize(
    ("name", "expected"),
    [("cosine", [0.96, 0.0]), ("dot", [24, 0]), ("euclidean", [-(2**0.5), -5]), ("manhattan", [-2, -7])],
)
def test_vectors_are_compared_as_the_model_says(name, expected):
    assert SIMILARITIES[name](A, B) == pytest.approx(expected)


# -- late interaction ---------------------------------------------------------------------------------


async def test_late_interaction_encodes_the_query_once(service, scripted):
    serve_as(service, LateInteraction())
    found = await scores(service, ["w1 w2"], ["w1 w2", "w1", "w3"])
    # Of the query's tokens, those that the document has too: both ends, and the words.
    assert found.values.tolist() == [4, 3, 2]
    assert [type(row.params[0]) for row in rows_of(scripted)] == [TokenEmbed, MaxSim, MaxSim, MaxSim]
    assert found.prompt_tokens == 6 + 4 + 3 + 3  # the query's instruction has two tokens
    assert_idle(service)


async def test_each_document_is_scored_against_its_own_query(service):
    serve_as(service, LateInteraction())
    found = await scores(service, ["w1 w2", "w3"], ["w3 w4", "w3 w4"])
    assert found.values.tolist() == [2, 3]


async def test_the_vectors_of_queries_count_as_memory_of_the_request(service, scripted):
    serve_as(service, LateInteraction())
    context = RequestContext()
    await score(service.model(), ScoreJob(queries=["w1 w2", "w3"], documents=["w3", "w3"]), context)
    assert context.reservation.nbytes == (6 + 5) * service.models.find().engine.facts.dimensions * 4
    full = RequestContext(reservation=Reservation(MemoryBudget(max_bytes=1), Client()))
    full.reservation.budget.add(Client("another"), 1)
    scripted.batches.clear()
    with pytest.raises(OverloadedError):
        await score(service.model(), ScoreJob(queries=["w1 w2"], documents=["w3"]), full)
    assert scripted.batches == []
    assert_idle(service)


async def test_the_vectors_of_documents_that_are_pooled_count_once_their_tokens_are_known(
    service, scripted, monkeypatch
):
    serve_as(service, attrs.evolve(LateInteraction(), token_pooling=TokenPooling(factor=2)))
    monkeypatch.setattr("trio_pool_serve.tasks.pool.MAX_TOKEN_NUMBERS", 8 * 40)
    context = RequestContext()
    await score(service.model(), ScoreJob(queries=["w1"], documents=["hello" * 400]), context)
    assert context.reservation.nbytes == (5 + 3) * 8 * 4
    with pytest.raises(InvalidRequestError, match="64 token vectors of 8 numbers"):
        await scores(service, ["w1"], ["! " * 30] * 2)
    assert [type(row.params[0]) for row in rows_of(scripted)] == [TokenEmbed] * 3
    assert_idle(service)


async def test_requests_at_once_with_one_id_get_their_own_scores(service, scripted, client):
    """A client's id is a label: it never names what is on the device."""
    serve_as(service, LateInteraction())
    answers: dict[str, list[float]] = {}

    async def ask(query: str) -> None:
        body = {"queries": query, "documents": ["w1 w2 w3", "w4 w5 w6"], "request_id": "same"}
        answer = await client.post("/score", json=body, headers={"X-Request-Id": "same"})
        assert answer.headers["X-Request-Id"] == "same"
        answers[query] = [item["score"] for item in answer.json()["data"]]

    scripted.gate.clear()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask, "w1 w2 w3")
        nursery.start_soon(ask, "w4 w5 w6")
        await trio.to_thread.run_sync(scripted.launching.wait)
        scripted.gate.set()
    assert answers == {"w1 w2 w3": [5, 2], "w4 w5 w6": [2, 5]}
