"""``/score`` and ``/rerank`` over real sockets; models compare vectors by their products, which are known."""

import httpx
import numpy as np
import pytest

from tests.api.scripted_models import Dots, served_as, vector_of
from tests.api.serving import post
from tests.conftest import assert_idle

service = served_as(Dots())


def product(query: str, document: str, prompt: str = "query : ") -> float:
    """The score, by default with the model's own prompt for queries."""
    return float(np.dot(vector_of(prompt + query), vector_of(document)))


# -- /score ----------------------------------------------------------------------------------------------


async def scores(client: httpx.AsyncClient, **body) -> list[float]:
    return [item["score"] for item in (await post(client, "/score", **body))["data"]]


async def test_an_answer_has_the_shape_vllm_s_clients_read(client, config):
    answer = await post(client, "/score", text_1="hello", text_2=["world", "hello hello"], request_id="mine")
    assert answer.pop("created") > 1_700_000_000
    assert answer == {
        "id": "score-mine",
        "object": "list",
        "model": config.models[0],
        "data": [
            {"index": 0, "object": "score", "score": product("hello", "world")},
            {"index": 1, "object": "score", "score": product("hello", "hello hello")},
        ],
        "usage": {"prompt_tokens": 12, "total_tokens": 12, "completion_tokens": 0},
    }


async def test_an_instruction_is_about_the_query(client):
    for given in (
        {"instruction": "passage : "},
        {"chat_template_kwargs": {"instruction": "passage : "}},
        {"chat_template_kwargs": {"instruction": "passage : "}, "instruction": "w1 "},
    ):
        (found,) = await scores(client, text_1="hello", text_2="world", **given)
        assert found == product("hello", "world", "passage : ")


# -- /rerank ---------------------------------------------------------------------------------------------

DOCUMENTS = ["w1", "w3", "w2", "w3"]
"""The greater the number, the better it fits."""


def result(index: int, documents: list[str] = DOCUMENTS, query: str = "hello") -> dict:
    document = documents[index]
    return {"index": index, "relevance_score": product(query, document), "document": {"text": document}}


async def rerank(client: httpx.AsyncClient, **body) -> dict:
    return await post(client, "/rerank", **{"query": "hello", "documents": DOCUMENTS, **body})


async def test_one_answer_has_what_every_client_reads(client, config):
    assert await rerank(client, request_id="mine") == {
        "id": "rerank-mine",
        "object": "rerank",
        "model": config.models[0],
        "usage": {"prompt_tokens": 17, "total_tokens": 17, "completion_tokens": 0},
        "results": [result(1), result(3), result(2), result(0)],
        "meta": {"api_version": {"version": "1"}, "billed_units": {"search_units": 1}},
    }


async def test_documents_may_be_objects_or_come_alone(client):
    answer = await rerank(client, documents=[{"text": "w1", "title": "one"}, "w2"], rank_fields=["text"])
    assert answer["results"] == [result(1, ["w1", "w2"]), result(0, ["w1", "w2"])]
    for alone in ("w1", {"text": "w1"}):
        assert (await rerank(client, documents=alone))["results"] == [result(0)]


async def test_an_empty_query_or_document_is_one(client):
    answer = await rerank(client, query="", documents=["", "w1"])
    assert answer["results"] == [result(1, ["", "w1"], ""), result(0, ["", "w1"], "")]


async def test_a_large_request_is_ranked_whole(client, service):
    documents = [f"w{n * 37 % 200}" for n in range(700)]
    answer = await rerank(client, documents=documents)
    order = sorted(range(700), key=lambda n: -(n * 37 % 200))
    assert answer["results"] == [result(index, documents) for index in order]
    assert_idle(service)


@pytest.mark.parametrize(
    "documents", [[{"content": "w1"}, ""], ["", {"content": "w1"}], [{"content": ""}, {"content": ""}]]
)
@pytest.mark.parametrize("query", ["", "hello"])
async def test_empty_texts_stand_next_to_contents(client, service, query, documents):
    """A content is rendered by itself; an empty text is as short as none."""
    answer = await rerank(client, query=query, documents=documents)
    assert {item["index"] for item in answer["results"]} == {0, 1}
    assert_idle(service)
