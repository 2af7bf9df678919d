"""The Open Inference Protocol over real sockets; the runner is scripted, so every answer is known."""

from typing import Any

import httpx
import numpy as np
import pytest

from tests.api.scripted_models import LONG, Able, Judge, Labeller, LateInteraction, become, served_as, vector_of
from tests.api.serving import post
from tests.tables import each
from trio_pool_serve.config import Config

PATH = "/v2/models/org/minilm/infer"

service = served_as(Able())


@pytest.fixture
def config(config: Config) -> Config:
    return Config(models=(f"org/minilm={config.models[0]}",))


def tensor(*texts: Any, name: str = "text", shape: list[int] | None = None) -> dict[str, Any]:
    return {"name": name, "shape": shape or [len(texts)], "datatype": "BYTES", "data": list(texts)}


async def outputs(client: httpx.AsyncClient, *inputs: dict[str, Any], **fields: Any) -> tuple[str, np.ndarray]:
    answer = await post(client, PATH, inputs=list(inputs), **fields)
    assert answer["model_name"] == "org/minilm"
    (output,) = answer["outputs"]
    assert output["datatype"] == "FP32"
    return output["name"], np.array(output["data"], dtype=np.float32).reshape(output["shape"])


@each(
    "given",
    [
        tensor("hello", "w1", name="any name"),
        tensor("hello", "w1", shape=[2, 1]),
        tensor(["hello"], ["w1"], shape=[2, 1]),
    ],
)
async def test_texts_become_a_tensor_of_vectors(client, given):
    name, values = await outputs(client, given, id="mine")
    assert (name, values.tolist()) == ("embedding", [vector_of("hello"), vector_of("w1")])


async def test_the_id_is_the_client_s_or_the_request_s(client):
    body = {"inputs": [tensor("hello")]}
    assert (await post(client, PATH, **body, id="mine"))["id"] == "mine"
    answer = await client.post(PATH, json=body, headers={"x-request-id": "theirs"})
    assert answer.json()["id"] == "theirs"


async def test_a_reranker_takes_a_query_and_documents(client, service, scripted):
    become(service, Judge())
    scripted.labels = 1
    given = tensor("hello", name="query"), tensor("w1", "w1 w2 w3", name="documents")
    name, values = await outputs(client, *given, outputs=[{"name": "score"}])
    assert (name, values.shape, values.argmax()) == ("score", (2,), 1)


async def test_a_classifier_gives_a_probability_for_each_label(client, service):
    become(service, Labeller())
    name, values = await outputs(client, tensor("hello", "w1"))
    assert (name, values.shape) == ("probabilities", (2, 2))


async def test_long_texts_are_refused_or_truncated_as_the_parameters_say(client):
    _, values = await outputs(client, tensor(LONG), parameters={"truncate": True})
    assert values.tolist() == [vector_of(" ".join(LONG.split()[:62]))]
    for parameters in ({}, {"truncate": False}):
        answer = await client.post(PATH, json={"inputs": [tensor(LONG)], "parameters": parameters})
        assert (answer.status_code, list(answer.json())) == (400, ["error"])


async def test_the_path_names_the_model(client):
    answer = await client.post("/v2/models/other/infer", json={"inputs": [tensor("hello")]})
    assert (answer.status_code, "`other`" in answer.json()["error"]) == (404, True)


@each("path", [f"{PATH}/", f"{PATH}//"])
async def test_slashes_at_the_end_are_no_part_of_a_name(client, path):
    answer = await client.post(path, json={"inputs": [tensor("hello")]})
    assert (answer.status_code, answer.json()["model_name"]) == (200, "org/minilm")
    assert (await client.get("/v2/models/org/minilm/ready/")).json() == {"name": "org/minilm", "ready": True}
    assert (await client.get("/v2/models/org/minilm/")).json()["name"] == "org/minilm"


async def test_a_model_s_tensors_are_described(client, service):
    async def described() -> Any:
        return (await client.get("/v2/models/org/minilm")).json()

    texts = [{"name": "text", "datatype": "BYTES", "shape": [-1]}]
    model = await described()
    assert (model["name"], model["inputs"]) == ("org/minilm", texts)
    assert model["outputs"] == [{"name": "embedding", "datatype": "FP32", "shape": [-1, 8]}]
    become(service, Judge())
    model = await described()
    assert [given["name"] for given in model["inputs"]] == ["query", "documents"]
    assert model["outputs"] == [{"name": "score", "datatype": "FP32", "shape": [-1]}]
    become(service, LateInteraction())
    assert "This route cannot use the model, which supports score and token_embed." in (await described())["error"]


async def test_whether_a_model_is_loaded_is_told(client, service):
    path = "/v2/models/org/minilm/ready"
    answer = await client.get(path)
    assert (answer.status_code, answer.json()) == (200, {"name": "org/minilm", "ready": True})
    unknown = await client.get("/v2/models/other/ready")
    assert (unknown.status_code, list(unknown.json())) == (404, ["error"])


async def test_the_server_is_described(client):
    answer = (await client.get("/v2")).json()
    assert (answer["name"], answer["extensions"]) == ("trio_pool_serve", [])
