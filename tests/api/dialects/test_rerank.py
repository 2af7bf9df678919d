"""``/rerank`` over real sockets; models compare vectors by their products, which are known."""

import httpx
import numpy as np
import pytest

from tests.api.scripted_models import Dots, Judge, serve_as
from tests.conftest import assert_idle, wait_idle
from tests.model_folders import VOCABULARY
from tests.scripted_runner import scripted_vector
from tests.tables import each
from trio_pool_serve.types import Classify, CopiedBatch

DOCUMENTS = ["w1", "w3", "w2", "w3"]
"""The greater the number, the better it fits."""


@pytest.fixture
async def service(service):
    serve_as(service, Dots())
    return service


def vector(*words: str) -> np.ndarray:
    ids = [VOCABULARY[word] for word in ("[CLS]", *words, "[SEP]")]
    return scripted_vector(np.array(ids, dtype=np.int32), 8)


def result(index: int, documents: list[str] = DOCUMENTS, query: str = "hello") -> dict:
    score = float(vector("query", ":", *query.split()) @ vector(*documents[index].split()))
    return {"index": index, "relevance_score": score, "document": {"text": documents[index]}}


async def rerank(client: httpx.AsyncClient, **body) -> dict:
    answer = await client.post("/rerank", json={"query": "hello", "documents": DOCUMENTS, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


async def test_one_answer_has_what_every_client_reads(client, config):
    assert await rerank(client, request_id="mine") == {
        "id": "rerank-mine",
        "object": "rerank",
        "model": config.models[0],
        "usage": {"prompt_tokens": 17, "total_tokens": 17, "completion_tokens": 0},
        "results": [result(1), result(3), result(2), result(0)],
        "meta": {"api_version": {"version": "1"}, "billed_units": {"search_units": 1}},
    }


async def test_documents_may_be_objects(client):
    answer = await rerank(client, documents=[{"text": "w1", "title": "one"}, "w2"], rank_fields=["text"])
    assert answer["results"] == [result(1, ["w1", "w2"]), result(0, ["w1", "w2"])]


async def test_a_document_may_come_alone(client):
    for alone in ("w1", {"text": "w1"}):
        assert (await rerank(client, documents=alone))["results"] == [result(0)]


@pytest.mark.parametrize(("top_n", "kept"), [(None, 4), (0, 4), (1, 1), ("1", 1), (3, 3), (4, 4), (100, 4)])
async def test_the_best_few_are_kept(client, top_n, kept):
    answer = await rerank(client, top_n=top_n)
    assert answer["results"] == [result(1), result(3), result(2), result(0)][:kept]
    assert answer["usage"]["prompt_tokens"] == 17


async def test_documents_come_back_unless_unwanted(client):
    for wanted in (None, True, "true", 1):
        assert (await rerank(client, return_documents=wanted))["results"][0] == result(1)
    for unwanted in (False, "false", 0):
        answer = await rerank(client, return_documents=unwanted)
        assert [set(found) for found in answer["results"]] == [{"index", "relevance_score"}] * 4


async def test_null_stands_for_not_given(client):
    fields = ["model", "top_n", "return_documents", "max_tokens_per_query", "max_tokens_per_doc", "instruction"]
    fields += ["truncate_prompt_tokens", "truncation_side", "use_activation", "activation", "raw_scores"]
    fields += ["rank_fields", "max_chunks_per_doc", "user", "priority", "request_id"]
    answer = await rerank(client, **dict.fromkeys(fields))
    assert answer["results"] == [result(1), result(3), result(2), result(0)]


@pytest.mark.parametrize(
    ("given", "activation"),
    [
        ({}, "score"),
        ({"use_activation": True, "raw_scores": False}, "score"),
        ({"use_activation": False}, "raw"),
        ({"activation": False}, "raw"),
        ({"raw_scores": True}, "raw"),
        ({"raw_scores": 1}, "raw"),
        ({"use_activation": "false"}, "raw"),
    ],
    ids=str,
)
async def test_a_judge_scores_unless_raw_numbers_are_asked_for(client, service, scripted, given, activation):
    serve_as(service, Judge())
    scripted.labels = 1
    answer = await rerank(client, documents=["w1", "w1 w1 w1", "w1 w1"], **given)
    assert [found["index"] for found in answer["results"]] == [1, 2, 0]
    requests = [request for batch in scripted.batches for request in batch.requests]
    assert {request.params for request in requests} == {(Classify(activation),)}


async def test_each_side_can_be_cut(client, scripted):
    body = {"query": "w1 " * 50, "documents": ["w2 " * 200], "max_tokens_per_query": 10, "max_tokens_per_doc": 20}
    answer = await rerank(client, **body)
    assert sorted(request.tokens for batch in scripted.batches for request in batch.requests) == [
        len(["query", ":"]) + 10 + 2,
        20 + 2,
    ]  # the limits are of the texts alone
    assert answer["results"][0]["document"] == {"text": "w2 " * 200}


async def test_no_limit_on_a_side_is_none(client, scripted):
    body = {"query": "w1 " * 50, "documents": ["w2 " * 50], "max_tokens_per_query": 0, "max_tokens_per_doc": "0"}
    await rerank(client, **body)
    assert sorted(request.tokens for batch in scripted.batches for request in batch.requests) == [
        50 + 2,
        len(["query", ":"]) + 50 + 2,
    ]


async def test_truncation_is_of_what_is_read_at_once(client, scripted):
    await rerank(client, documents=["w2 " * 200], truncate_prompt_tokens=30)
    assert max(request.tokens for batch in scripted.batches for request in batch.requests) == 30


async def test_an_instruction_is_about_the_query(client):
    answer = await rerank(client, documents=["w1"], instruction="passage : ")
    assert answer["results"][0]["relevance_score"] == float(vector("passage", ":", "hello") @ vector("w1"))
    also = await rerank(client, documents=["w1"], instruction="w3 ", chat_template_kwargs={"instruction": "passage : "})
    assert also["results"] == answer["results"]


async def test_an_empty_query_or_document_is_one(client):
    answer = await rerank(client, query="", documents=["", "w1"])
    assert answer["results"] == [result(1, ["", "w1"], ""), result(0, ["", "w1"], "")]


async def test_a_large_request_is_ranked_whole(client, service):
    documents = [f"w{n * 37 % 200}" for n in range(700)]
    answer = await rerank(client, documents=documents)
    order = sorted(range(700), key=lambda n: -(n * 37 % 200))
    assert answer["results"] == [result(index, documents) for index in order]
    assert_idle(service)


@pytest.mark.parametrize("wrong", [np.nan, -np.inf])
async def test_what_is_no_number_never_reaches_a_client(client, service, scripted, wrong):
    serve_as(service, Judge())
    scripted.on_launch = lambda batch: CopiedBatch([(np.array([wrong], dtype=np.float32),)] * len(batch.requests))
    answer = await client.post("/rerank", json={"query": "hello", "documents": DOCUMENTS})
    assert answer.status_code == 500
    assert answer.json()["error"]["type"] == "InternalServerError"
    await wait_idle(service)


@each(
    ("wrong", "param"),
    [
        ({"query": None}, "query"),
        ({"query": 5}, "query"),
        ({"query": ["hello"]}, "query"),
        ({"documents": None}, "documents"),
        ({"documents": []}, "documents"),
        ({"documents": 5}, "documents"),
        ({"documents": {"title": "one"}}, "documents"),
        ({"documents": ["w1", 5]}, "documents"),
        ({"documents": [{"title": "one"}]}, "documents"),
        ({"documents": [{"text": None}]}, "documents"),
        ({"documents": ["w1"] * 2049}, "documents"),
        ({"top_n": -1}, "top_n"),
        ({"top_n": 1.5}, "top_n"),
        ({"top_n": "three"}, "top_n"),
        ({"return_documents": "yes"}, "return_documents"),
        ({"raw_scores": 2}, "raw_scores"),
        ({"max_tokens_per_query": -1}, "max_tokens_per_query"),
        ({"max_tokens_per_doc": -1}, "max_tokens_per_doc"),
        ({"instruction": 5}, "instruction"),
        ({"chat_template_kwargs": {"instruction": 5}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"poem": "x"}}, "chat_template_kwargs"),
        ({"instruction": "x" * 10_000}, "instruction"),
        ({"documents": ["w1", "w2 " * 100]}, None),
    ],
)
async def test_what_is_wrong_is_400_and_named(client, service, wrong, param):
    answer = await client.post("/rerank", json={"query": "hello", "documents": DOCUMENTS, **wrong})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["type"] == "BadRequestError"
    assert answer.json()["error"]["param"] == param
    await wait_idle(service)


@pytest.mark.parametrize(
    "documents", [[{"content": "w1"}, ""], ["", {"content": "w1"}], [{"content": ""}, {"content": ""}]]
)
@pytest.mark.parametrize("query", ["", "hello"])
async def test_empty_texts_stand_next_to_contents(client, service, query, documents):
    """A content is rendered by itself; an empty text is as short as none."""
    answer = await rerank(client, query=query, documents=documents)
    assert {item["index"] for item in answer["results"]} == {0, 1}
    assert_idle(service)
