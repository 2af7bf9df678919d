"""``/score`` over real sockets; models compare vectors by their products, which are known."""

import httpx
import numpy as np
import pytest

from tests.api.scripted_models import Dots, Judge, LateInteraction, serve_as
from tests.api.serving import refused
from tests.conftest import assert_idle, wait_idle
from tests.model_folders import VOCABULARY
from tests.scripted_runner import scripted_vector
from tests.tables import each
from trio_pool_serve.types import CopiedBatch


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


async def test_an_instruction_is_about_the_query(client):
    for given in (
        {"instruction": "passage : "},
        {"chat_template_kwargs": {"instruction": "passage : "}},
        {"chat_template_kwargs": {"instruction": "passage : "}, "instruction": "w1 "},
    ):
        (found,) = await scores(client, text_1="hello", text_2="world", **given)
        assert found == float(vector("passage", ":", "hello") @ vector("world"))


async def test_late_interaction_scores_by_tokens(client, service):
    serve_as(service, LateInteraction())
    found = await scores(client, text_1="hello world", text_2=["hello", "world hello"])
    assert found == [3, 4]  # what they have in common, [CLS] and [SEP] included
    assert_idle(service)


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
        ({"text_1": ["a", "b"], "text_2": "c"}, "text_1"),
        ({"text_1": ["a", "b"], "text_2": ["c"]}, "text_1"),
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
        ({"text_1": [5], "text_2": "a"}, "text_1"),
        ({"text_1": "a", "text_2": [["b"]]}, "text_2"),
        ({"data_1": "a", "data_2": {}}, "data_2"),
        ({"text_1": "a", "text_2": ["b"] * 2049}, "text_2"),
        ({"text_1": "a", "text_2": "b", "max_tokens_per_query": -1}, "max_tokens_per_query"),
        ({"text_1": "a", "text_2": "b", "max_tokens_per_doc": -1}, "max_tokens_per_doc"),
        ({"text_1": "a", "text_2": "b " * 100}, None),
    ],
)
async def test_what_is_wrong_is_400_and_named(client, service, body, param):
    assert (await refused(client, "/score", body))["param"] == param
    await wait_idle(service)
