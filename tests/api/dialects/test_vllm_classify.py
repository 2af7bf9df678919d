"""``/classify`` over real sockets; the runner gives each text its length and the sum of its ids."""

import httpx
import numpy as np
import pytest

from tests.api.scripted_models import Everything, Labeller, serve_as
from tests.conftest import assert_idle
from tests.model_folders import VOCABULARY
from trio_pool_serve.types import CopiedBatch

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
