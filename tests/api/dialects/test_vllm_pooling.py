"""``/pooling`` and ``/classify`` over real sockets; the runner is scripted, so every answer is known."""

import base64
import json

import httpx
import numpy as np
import pytest

from tests.api.scripted_models import (
    Everything,
    Judge,
    Labeller,
    LateInteraction,
    SparseOnly,
    serve_as,
    served_as,
    vector_of,
)
from tests.api.serving import post, refused
from tests.conftest import assert_idle
from tests.model_folders import VOCABULARY
from trio_pool_serve.types import Classify, Embed

HELLO, WORLD, CLS, SEP = (VOCABULARY[word] for word in ("hello", "world", "[CLS]", "[SEP]"))

service = served_as(Everything())


def matrix(ids: list[int], dimensions: int = 8) -> list[list[float]]:
    return [vector_of([token], dimensions) for token in ids]


def weights(ids: list[int]) -> list[dict]:
    return [{"index": token, "value": float(ids.count(token))} for token in sorted(set(ids))]


EXPECTED = {
    "embed": vector_of,
    "token_embed": matrix,
    "sparse_embed": weights,
    "classify": lambda ids: vector_of(ids, 2),
    "token_classify": lambda ids: matrix(ids, 2),
}


async def items(client: httpx.AsyncClient, **body) -> list[dict]:
    return (await post(client, "/pooling", **body))["data"]


async def pooled(client: httpx.AsyncClient, **body) -> list:
    return [item["data"] for item in await items(client, **body)]


async def test_an_answer_has_the_shape_vllm_s_clients_read(client, config):
    answer = await post(client, "/pooling", input="hello world", request_id="mine")
    assert answer.pop("created") > 1_700_000_000
    assert answer == {
        "id": "pooling-mine",
        "object": "list",
        "model": config.models[0],
        "data": [{"index": 0, "object": "pooling", "data": vector_of([CLS, HELLO, WORLD, SEP])}],
        "usage": {"prompt_tokens": 4, "total_tokens": 4, "completion_tokens": 0},
    }


@pytest.mark.parametrize("task", EXPECTED)
async def test_each_task_has_data_of_its_own_form(client, service, task):
    rows = [[7, 8, 8], [9]]
    assert await pooled(client, input=rows, task=task) == [EXPECTED[task](ids) for ids in rows]
    assert_idle(service)


@pytest.mark.parametrize(
    ("spec", "task"),
    [(Everything, "embed"), (Labeller, "classify"), (LateInteraction, "token_embed"), (SparseOnly, "sparse_embed")],
)
async def test_a_model_is_asked_for_what_it_is_made_for(client, service, spec, task):
    serve_as(service, spec())
    for given in ({}, {"task": None, "tasks": None}):
        assert await pooled(client, input=[7, 8], **given) == [EXPECTED[task]([7, 8])]


async def test_a_model_that_only_scores_has_nothing_to_pool(client, service):
    serve_as(service, Judge())
    assert "which supports score." in (await refused(client, "/pooling", {"input": "hello"}))["message"]


async def test_several_tasks_come_from_one_forward_pass(client, scripted):
    found = await pooled(client, input=[[7, 8, 8]], tasks=[*EXPECTED, "embed"])
    assert found == [{task: expected([7, 8, 8]) for task, expected in EXPECTED.items()}]
    assert scripted.rows == [1]
    assert len(scripted.batches[0].requests[0].params) == 5


async def test_one_task_in_a_list_is_named_all_the_same(client):
    assert await pooled(client, input=[7], tasks=["classify"]) == [{"classify": vector_of([7], 2)}]


async def test_one_task_of_several_that_the_model_cannot_do_is_400(client, service, scripted):
    serve_as(service, LateInteraction())
    error = await refused(client, "/pooling", input="hello", tasks=["token_embed", "embed"])
    assert error["message"].startswith("Unsupported task: 'embed'. Supported tasks of `")
    assert error["message"].endswith("`: score, token_embed.")
    assert scripted.batches == []


@pytest.mark.parametrize("task", ["embed", "token_embed"])
async def test_use_activation_of_vectors_is_normalize(client, scripted, task):
    for given, normalize in (({}, None), ({"use_activation": True}, True), ({"use_activation": "false"}, False)):
        await items(client, input="hello", task=task, **given)
        (params,) = scripted.batches[-1].requests[0].params
        assert params.normalize is normalize, given
    error = await refused(client, "/pooling", input="hello", task=task, use_activation=True, normalize=False)
    assert error["param"] == "use_activation"


async def test_use_activation_of_labels_leaves_vectors_as_they_are(client, scripted):
    await items(client, input="hello", tasks=["embed", "classify"], use_activation=False, normalize=True)
    assert scripted.batches[0].requests[0].params == (Embed(normalize=True), Classify("raw"))


# -- encodings -------------------------------------------------------------------------------------------


async def test_base64_is_for_arrays_and_weights_stay_json(client):
    (item,) = await items(client, input=[7, 8], tasks=["token_embed", "sparse_embed"], encoding_format="base64")
    assert item["data"]["sparse_embed"] == weights([7, 8])
    assert item["shape"] == {"token_embed": [2, 8], "sparse_embed": [2]}
    found = np.frombuffer(base64.b64decode(item["data"]["token_embed"]), "<f4")
    assert found.reshape(2, 8).tolist() == matrix([7, 8])


@pytest.mark.parametrize(("task", "shape"), [("embed", [8]), ("token_embed", [2, 8]), ("token_classify", [2, 2])])
async def test_bytes_come_with_the_place_and_shape_of_each_row(client, task, shape):
    body = {"input": [[7, 8], [9, 10]], "task": task, "encoding_format": "bytes", "endianness": "little"}
    answer = await client.post("/pooling", json=body)
    assert answer.headers["content-type"] == "application/octet-stream"
    metadata = json.loads(answer.headers["metadata"])
    assert metadata["id"].startswith("pooling-")
    assert metadata["usage"] == {"prompt_tokens": 4, "total_tokens": 4, "completion_tokens": 0}
    assert [item["shape"] for item in metadata["data"]] == [shape, shape]
    found = [
        np.frombuffer(answer.content[item["start"] : item["end"]], "<f4").reshape(item["shape"]).tolist()
        for item in metadata["data"]
    ]
    assert found == [EXPECTED[task]([7, 8]), EXPECTED[task]([9, 10])]
    alone = await client.post("/pooling", json={**body, "encoding_format": "bytes_only"})
    assert alone.content == answer.content
    assert "metadata" not in alone.headers


# -- /classify ------------------------------------------------------------------------------------------


def classified(index: int, ids: list[int], labels: tuple[str, str] = ("no", "yes")) -> dict:
    numbers = [float(len(ids)), float(sum(ids))]
    label = labels[int(np.argmax(numbers))]
    return {"index": index, "label": label, "probs": numbers, "num_classes": 2, "object": "classify"}


async def test_classes_have_the_shape_vllm_s_clients_read(client, config):
    answer = await post(client, "/classify", input="hello world", request_id="mine")
    assert answer.pop("created") > 1_700_000_000
    assert answer == {
        "id": "classify-mine",
        "object": "list",
        "model": config.models[0],
        "data": [classified(0, [CLS, HELLO, WORLD, SEP])],
        "usage": {"prompt_tokens": 4, "total_tokens": 4, "completion_tokens": 0},
    }


async def test_the_label_is_that_of_the_greatest_number_or_its_number(client, service):
    for spec, labels in ((Everything(), ("no", "yes")), (Labeller(), ("LABEL_0", "LABEL_1"))):
        serve_as(service, spec)
        answer = await post(client, "/classify", input=[[0, 0], [9, 9]])
        assert answer["data"] == [classified(0, [0, 0], labels), classified(1, [9, 9], labels)]
        assert [item["label"] for item in answer["data"]] == list(labels)


async def test_one_label_is_every_text_s(client, service, scripted):
    scripted.labels = 1
    serve_as(service, Everything(labels=("toxic",)))
    (found,) = (await post(client, "/classify", input=[7, 8]))["data"]
    assert found == {"index": 0, "label": "toxic", "probs": [2.0], "num_classes": 1, "object": "classify"}
