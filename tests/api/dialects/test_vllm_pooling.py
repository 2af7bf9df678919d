"""What ``/pooling`` asks of the model, and what ``/tokenize`` counts, over real sockets with a scripted runner."""

import json

import httpx
import numpy as np
import pytest

from tests.api.scripted_models import Everything, served_as, vector_of
from tests.api.serving import post, refused
from trio_pool_serve.types import Classify, Embed

service = served_as(Everything())


def matrix(ids: list[int], dimensions: int = 8) -> list[list[float]]:
    return [vector_of([token], dimensions) for token in ids]


EXPECTED = {
    "embed": vector_of,
    "token_embed": matrix,
    "token_classify": lambda ids: matrix(ids, 2),
}


async def items(client: httpx.AsyncClient, **body) -> list[dict]:
    return (await post(client, "/pooling", **body))["data"]


async def test_several_tasks_come_from_one_forward_pass(client, scripted):
    await items(client, input=[[7, 8, 8]], tasks=[*EXPECTED, "sparse_embed", "classify", "embed"])
    assert scripted.rows == [1]
    assert len(scripted.batches[0].requests[0].params) == 5


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


# -- tokens ----------------------------------------------------------------------------------------------


async def test_more_tokens_than_the_model_takes_are_counted_all_the_same(client):
    answer = await post(client, "/tokenize", prompt="hello " * 5000)
    assert answer["count"] == len(answer["tokens"]) == 5002
