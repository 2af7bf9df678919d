"""``/classify`` over real sockets; the runner gives each text its length and the sum of its ids."""

import httpx
import numpy as np
import pytest

from tests.api.scripted_models import Everything, Labeller, serve_as
from tests.conftest import assert_idle
from tests.model_folders import VOCABULARY
from tests.tables import each
from trio_pool_serve.types import Classify, CopiedBatch

HELLO, WORLD, CLS, SEP = (VOCABULARY[word] for word in ("hello", "world", "[CLS]", "[SEP]"))


@pytest.fixture
async def service(service):
    serve_as(service, Everything())
    return service


async def classify(client: httpx.AsyncClient, **body) -> dict:
    answer = await client.post("/classify", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def item(index: int, ids: list[int], labels: tuple[str, str] = ("no", "yes")) -> dict:
    numbers = [float(len(ids)), float(sum(ids))]
    label = labels[int(np.argmax(numbers))]
    return {"index": index, "label": label, "probs": numbers, "num_classes": 2, "object": "classify"}


async def test_an_answer_has_the_shape_vllm_s_clients_read(client, config):
    answer = await classify(client, input="hello world", request_id="mine")
    assert answer.pop("created") > 1_700_000_000
    assert answer == {
        "id": "classify-mine",
        "object": "list",
        "model": config.models[0],
        "data": [item(0, [CLS, HELLO, WORLD, SEP])],
        "usage": {"prompt_tokens": 4, "total_tokens": 4, "completion_tokens": 0},
    }


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("hello", [[CLS, HELLO, SEP]]),
        (["hello", "world world"], [[CLS, HELLO, SEP], [CLS, WORLD, WORLD, SEP]]),
        ([7, 8, 9], [[7, 8, 9]]),
        ([[7, 8], [0]], [[7, 8], [0]]),
    ],
    ids=["text", "texts", "ids", "lists of ids"],
)
async def test_all_four_forms_of_input_are_taken(client, given, expected):
    answer = await classify(client, input=given)
    assert answer["data"] == [item(index, ids) for index, ids in enumerate(expected)]


async def test_the_label_is_that_of_the_greatest_number(client):
    assert [found["label"] for found in (await classify(client, input=[[0, 0], [9, 9]]))["data"]] == ["no", "yes"]


async def test_labels_without_names_are_numbered(client, service):
    serve_as(service, Labeller())
    answer = await classify(client, input=[[0, 0], [9, 9]])
    assert answer["data"] == [item(0, [0, 0], ("LABEL_0", "LABEL_1")), item(1, [9, 9], ("LABEL_0", "LABEL_1"))]


async def test_one_label_is_every_text_s(client, service, scripted):
    scripted.labels = 1
    serve_as(service, Everything(labels=("toxic",)))
    (found,) = (await classify(client, input=[7, 8]))["data"]
    assert found == {"index": 0, "label": "toxic", "probs": [2.0], "num_classes": 1, "object": "classify"}


@pytest.mark.parametrize(
    ("given", "activation"),
    [
        ({}, "probabilities"),
        ({"use_activation": None}, "probabilities"),
        ({"use_activation": True}, "probabilities"),
        ({"use_activation": False}, "raw"),
        ({"activation": False}, "raw"),
    ],
    ids=str,
)
async def test_numbers_are_probabilities_unless_told_otherwise(client, scripted, given, activation):
    await classify(client, input="hello", **given)
    (batch,) = scripted.batches
    assert batch.requests[0].params == (Classify(activation),)


async def test_null_stands_for_not_given(client):
    fields = ["model", "use_activation", "activation", "truncate_prompt_tokens", "truncation_side"]
    fields += ["add_special_tokens", "prompt_name", "user", "priority", "request_id"]
    answer = await classify(client, input="hello", **dict.fromkeys(fields))
    assert answer["data"] == [item(0, [CLS, HELLO, SEP])]


async def test_texts_are_read_as_asked(client):
    answer = await classify(client, input="hello", add_special_tokens=False)
    assert answer["data"] == [item(0, [HELLO])]
    answer = await classify(client, input=[7, 8, 9], truncate_prompt_tokens=2, truncation_side="left")
    assert answer["data"] == [item(0, [8, 9])]
    answer = await classify(client, input="hello", prompt_name="query")
    assert answer["data"][0]["probs"][0] == 5


async def test_answers_keep_the_order_of_a_large_request(client, service):
    answer = await classify(client, input=[[n % 200] for n in range(700)])
    assert answer["data"] == [item(n, [n % 200]) for n in range(700)]
    assert_idle(service)


async def test_what_is_no_number_never_reaches_a_client(client, service, scripted):
    scripted.on_launch = lambda batch: CopiedBatch([(np.array([np.nan, 1], dtype=np.float32),)])
    answer = await client.post("/classify", json={"input": "hello"})
    assert answer.status_code == 500
    assert answer.json()["error"]["type"] == "InternalServerError"
    assert_idle(service)


@each("given", [[], [[]], None, 5, {}, [1.5], ["a", 5], [["a", "b"]], [[[5]]], [-1]])
async def test_a_wrong_input_is_400(client, service, given):
    answer = await client.post("/classify", json={"input": given})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == "input"
    assert_idle(service)


async def test_too_many_inputs_are_400(client):
    answer = await client.post("/classify", json={"input": [[5]] * 2049})
    assert answer.status_code == 400
    assert "2048" in answer.json()["error"]["message"]
