"""``/rerank`` over real sockets; models compare vectors by their products, which are known."""

import httpx
import numpy as np
import pytest

from tests.api.scripted_models import Dots, Judge, serve_as
from tests.api.serving import refused
from tests.conftest import assert_idle, wait_idle
from tests.model_folders import VOCABULARY
from tests.scripted_runner import scripted_vector
from tests.tables import each
from trio_pool_serve.types import CopiedBatch

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
        ({"documents": None}, "documents"),
        ({"documents": []}, "documents"),
        ({"documents": {"title": "one"}}, "documents"),
        ({"documents": ["w1", 5]}, "documents"),
        ({"documents": [{"title": "one"}]}, "documents"),
        ({"documents": [{"text": None}]}, "documents"),
        ({"documents": ["w1"] * 2049}, "documents"),
        ({"top_n": -1}, "top_n"),
        ({"max_tokens_per_query": -1}, "max_tokens_per_query"),
        ({"max_tokens_per_doc": -1}, "max_tokens_per_doc"),
        ({"chat_template_kwargs": {"instruction": 5}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"poem": "x"}}, "chat_template_kwargs"),
        ({"instruction": "x" * 10_000}, "instruction"),
        ({"documents": ["w1", "w2 " * 100]}, None),
    ],
)
async def test_what_is_wrong_is_400_and_named(client, service, wrong, param):
    error = await refused(client, "/rerank", {"query": "hello", "documents": DOCUMENTS, **wrong})
    assert (error["type"], error["param"]) == ("BadRequestError", param)
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
