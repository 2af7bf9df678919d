"""``/score`` over real sockets; models compare vectors by their products, which are known."""

import httpx
import numpy as np
import pytest

from tests.api.scripted_models import Dots, Judge, LateInteraction, serve_as
from tests.conftest import assert_idle, wait_idle
from tests.model_folders import VOCABULARY
from tests.scripted_runner import scripted_vector
from tests.tables import each
from trio_pool_serve.types import Classify, CopiedBatch


@pytest.fixture
async def service(service):
    serve_as(service, Dots())
    return service


def vector(*words: str) -> np.ndarray:
    ids = [VOCABULARY[word] for word in ("[CLS]", *words, "[SEP]")]
    return scripted_vector(np.array(ids, dtype=np.int32), 8)


def product(query: str, document: str) -> float:
    """The score by the model's own prompt for queries."""
    return float(vector("query", ":", *query.split()) @ vector(*document.split()))


async def score(client: httpx.AsyncClient, **body) -> dict:
    answer = await client.post("/score", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def scores(client: httpx.AsyncClient, **body) -> list[float]:
    return [item["score"] for item in (await score(client, **body))["data"]]


async def test_an_answer_has_the_shape_vllm_s_clients_read(client, config):
    answer = await score(client, text_1="hello", text_2=["world", "hello hello"], request_id="mine")
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


@pytest.mark.parametrize(
    ("first", "second"),
    [("text_1", "text_2"), ("queries", "documents"), ("data_1", "data_2"), ("queries", "items")],
)
async def test_the_sides_go_by_all_their_names(client, first, second):
    assert await scores(client, **{first: "hello", second: "world"}) == [product("hello", "world")]


@pytest.mark.parametrize(
    ("queries", "documents", "pairs"),
    [
        ("w1", "w2", [("w1", "w2")]),
        (["w1"], ["w2"], [("w1", "w2")]),
        (["w1"], "w2", [("w1", "w2")]),
        ("w1", ["w2", "w3"], [("w1", "w2"), ("w1", "w3")]),
        (["w1"], ["w2", "w3"], [("w1", "w2"), ("w1", "w3")]),
        (["w1", "w2"], ["w3", "w4"], [("w1", "w3"), ("w2", "w4")]),
    ],
    ids=str,
)
async def test_one_is_scored_with_one_one_with_many_or_many_one_by_one(client, queries, documents, pairs):
    assert await scores(client, queries=queries, documents=documents) == [product(*pair) for pair in pairs]


@pytest.mark.parametrize(("ones", "others"), [(["a", "b"], "c"), (["a", "b"], ["c"]), (["a", "b"], ["c", "d", "e"])])
async def test_many_with_one_are_refused_with_what_is_allowed(client, service, ones, others):
    answer = await client.post("/score", json={"text_1": ones, "text_2": others})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "text_1"
    assert "Input lengths must be either 1:1, 1:N or N:N" in answer.json()["error"]["message"]
    assert_idle(service)


async def test_null_stands_for_not_given(client):
    fields = ["model", "queries", "documents", "items", "data_1", "data_2", "max_tokens_per_query"]
    fields += ["max_tokens_per_doc", "instruction", "truncate_prompt_tokens", "truncation_side", "use_activation"]
    fields += ["activation", "user", "priority", "request_id"]
    assert await scores(client, text_1="hello", text_2="world", **dict.fromkeys(fields)) == [product("hello", "world")]


async def test_each_side_can_be_cut(client, scripted):
    await score(client, text_1="w1 " * 50, text_2="w2 " * 200, max_tokens_per_query=10, max_tokens_per_doc=20)
    assert sorted(request.tokens for batch in scripted.batches for request in batch.requests) == [
        len(["query", ":"]) + 10 + 2,
        20 + 2,
    ]  # the limits are of the texts alone


async def test_no_limit_on_a_side_is_none(client, scripted):
    await score(client, text_1="w1 " * 50, text_2="w2 " * 50, max_tokens_per_query=0, max_tokens_per_doc="0")
    assert sorted(request.tokens for batch in scripted.batches for request in batch.requests) == [
        50 + 2,
        len(["query", ":"]) + 50 + 2,
    ]


async def test_truncation_is_of_what_is_read_at_once(client, scripted):
    await score(client, text_1="w1", text_2="w2 " * 200, truncate_prompt_tokens=30)
    assert max(request.tokens for batch in scripted.batches for request in batch.requests) == 30


async def test_an_instruction_is_about_the_query(client):
    for given in (
        {"instruction": "passage : "},
        {"chat_template_kwargs": {"instruction": "passage : "}},
        {"chat_template_kwargs": {"instruction": "passage : "}, "instruction": "w1 "},
    ):
        (found,) = await scores(client, text_1="hello", text_2="world", **given)
        assert found == float(vector("passage", ":", "hello") @ vector("world"))


async def test_an_instruction_past_reason_is_400_and_named(client):
    body = {"text_1": "hello", "text_2": "world", "instruction": "x" * 10_000}
    answer = await client.post("/score", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "instruction"


@pytest.mark.parametrize(
    ("given", "activation"),
    [
        ({}, "score"),
        ({"use_activation": True}, "score"),
        ({"use_activation": False}, "raw"),
        ({"activation": False}, "raw"),
    ],
    ids=str,
)
async def test_a_judge_reads_both_and_scores_unless_raw_numbers_are_asked_for(
    client, service, scripted, given, activation
):
    serve_as(service, Judge())
    scripted.labels = 1
    (found,) = await scores(client, text_1="hello", text_2="world", **given)
    (request,) = (request for batch in scripted.batches for request in batch.requests)
    assert request.params == (Classify(activation),)
    assert found == request.tokens


async def test_late_interaction_scores_by_tokens(client, service):
    serve_as(service, LateInteraction())
    found = await scores(client, text_1="hello world", text_2=["hello", "world hello"])
    assert found == [3, 4]  # what they have in common, [CLS] and [SEP] included
    assert_idle(service)


async def test_an_empty_text_is_one(client):
    assert await scores(client, text_1="", text_2="world") == [product("", "world")]


async def test_scores_keep_the_order_of_a_large_request(client, service):
    words = [f"w{n % 200}" for n in range(700)]
    assert await scores(client, text_1="hello", text_2=words) == [product("hello", word) for word in words]
    assert_idle(service)


@pytest.mark.parametrize("wrong", [np.nan, np.inf])
async def test_what_is_no_number_never_reaches_a_client(client, service, scripted, wrong):
    serve_as(service, Judge())
    scripted.on_launch = lambda batch: CopiedBatch([(np.array([wrong], dtype=np.float32),)])
    answer = await client.post("/score", json={"text_1": "hello", "text_2": "world"})
    assert answer.status_code == 500
    assert answer.json()["error"]["type"] == "InternalServerError"
    assert_idle(service)


@each(
    ("body", "param"),
    [
        ({}, None),
        ({"text_1": "a"}, "text_2"),
        ({"text_2": "a"}, "text_1"),
        ({"queries": "a"}, "documents"),
        ({"documents": "a"}, "queries"),
        ({"items": "a"}, "queries"),
        ({"text_1": "a", "documents": "b"}, "text_2"),
        ({"queries": "a", "documents": "b", "items": "c"}, None),
        ({"text_1": [], "text_2": ["a"]}, "text_1"),
        ({"text_1": "a", "text_2": []}, "text_2"),
        ({"queries": "a", "items": []}, "items"),
        ({"text_1": 5, "text_2": "a"}, "text_1"),
        ({"text_1": [5], "text_2": "a"}, "text_1"),
        ({"text_1": "a", "text_2": [["b"]]}, "text_2"),
        ({"data_1": "a", "data_2": {}}, "data_2"),
        ({"text_1": "a", "text_2": ["b"] * 2049}, "text_2"),
        ({"text_1": "a", "text_2": "b", "max_tokens_per_query": -1}, "max_tokens_per_query"),
        ({"text_1": "a", "text_2": "b", "max_tokens_per_doc": -1}, "max_tokens_per_doc"),
        ({"text_1": "a", "text_2": "b", "max_tokens_per_doc": "five"}, "max_tokens_per_doc"),
        ({"text_1": "a", "text_2": "b", "instruction": 5}, "instruction"),
        ({"text_1": "a", "text_2": "b " * 100}, None),
    ],
)
async def test_what_is_wrong_is_400_and_named(client, service, body, param):
    answer = await client.post("/score", json=body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param
    await wait_idle(service)
