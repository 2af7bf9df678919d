"""Ollama's routes over real sockets; the runner is scripted, so every answer is known."""

import json
import math
from datetime import UTC, datetime

import attrs
import pytest

import trio_pool_serve
from tests.api.scripted_models import LONG, Able, Judge, become, served_as, vector_of
from tests.api.serving import post, serving
from tests.conftest import assert_idle
from tests.scripted_runner import ScriptedRunner
from tests.tables import each
from trio_pool_serve.types import Embed

MODEL = {"model": "minilm"}
IDLE_S = 300.0

service = served_as(Able())


@pytest.fixture
def config(config):
    changes = attrs.evolve(config.model_changes, idle_unload_s=IDLE_S)
    return attrs.evolve(config, models=(f"minilm={config.models[0]}",), model_changes=changes)


def params_of(scripted: ScriptedRunner) -> list[Embed]:
    return [param for batch in scripted.batches for request in batch.requests for param in request.params]


# -- embeddings -------------------------------------------------------------------------------------------


async def test_each_input_gets_a_vector_of_unit_length_and_the_rest_is_counted(client, scripted, service):
    answer = await post(client, "/api/embed", model="minilm:latest", input=["hello", "w1 w2"])
    assert answer.pop("total_duration") > answer.pop("load_duration") >= 0
    assert answer == {
        "model": "minilm:latest",
        "embeddings": [vector_of("hello"), vector_of("w1 w2")],
        "prompt_eval_count": 7,
    }
    assert params_of(scripted) == [Embed(normalize=True)] * 2
    assert_idle(service)


async def test_the_older_route_embeds_one_text_and_does_not_normalise(client, scripted):
    assert await post(client, "/api/embeddings", prompt="hello", **MODEL) == {"embedding": vector_of("hello")}
    assert params_of(scripted) == [Embed(normalize=False)]


@each("given", ["", [], None])
async def test_nothing_to_embed_is_not_computed(client, scripted, given):
    assert (await post(client, "/api/embed", input=given, **MODEL))["embeddings"] == []
    assert scripted.batches == []


@each(("dimensions", "used"), [(3, 3), (8, 8), (9, None), (2**31 - 1, None), (0, None), (None, None)])
async def test_more_dimensions_than_the_model_has_are_all_of_them(client, scripted, dimensions, used):
    scripted.batches.clear()
    (vector,) = (await post(client, "/api/embed", input="hello", dimensions=dimensions, **MODEL))["embeddings"]
    assert len(vector) == (used or 8)
    assert params_of(scripted) == [Embed(dimensions=used, normalize=True)]


@each("keep_alive", [0, -1, 300, 1.5, "5m", "-1m", "1h30m", "0", "24h", "1.5s", "100ms", None])
async def test_keep_alive_is_read_and_unloads_nothing(client, service, keep_alive):
    await post(client, "/api/embed", input="hello", keep_alive=keep_alive, **MODEL)
    assert service.models.find().state == "loaded"


@each("num_ctx", [5, 10**6])
async def test_num_ctx_bounds_pairs_as_far_as_the_model_goes(client, service, scripted, num_ctx):
    become(service, Judge())
    scripted.labels = 1
    scripted.batches.clear()
    await post(client, "/api/rerank", query="w1", documents=[LONG], options={"num_ctx": num_ctx}, **MODEL)
    assert [request.tokens for batch in scripted.batches for request in batch.requests] == [min(num_ctx, 64)]


@each("kind", ["application/x-www-form-urlencoded", "text/plain", "application/json; charset=utf-8", "*/*", ""])
async def test_any_content_type_is_taken_for_json(client, kind):
    body = json.dumps({"input": "hello", **MODEL})
    answer = await client.post("/api/embed", content=body, headers={"content-type": kind} if kind else {})
    assert answer.status_code == 200, answer.text
    assert answer.json()["embeddings"] == [vector_of("hello")]


# -- models -----------------------------------------------------------------------------------------------

DETAILS = {
    "parent_model": "",
    "format": "safetensors",
    "families": ["bert"],
    "family": "bert",
    "parameter_size": "",
    "quantization_level": "",
    "context_length": 64,
    "embedding_length": 8,
}


async def test_models_are_listed_with_a_tag_and_what_their_files_say(client, service):
    (listed,) = (await client.get("/api/tags")).json()["models"]
    modified_at, size, digest = (listed.pop(name) for name in ("modified_at", "size", "digest"))
    assert datetime.fromisoformat(modified_at).timestamp() == pytest.approx(service.models.find().created, abs=1e-3)
    assert size >= 0
    assert len(bytes.fromhex(digest)) == 32
    assert listed == {
        "name": "minilm:latest",
        "model": "minilm:latest",
        "details": DETAILS,
        "capabilities": ["embedding"],
    }


async def test_a_loaded_model_is_listed_with_the_time_when_it_would_be_unloaded(client, service):
    await post(client, "/api/embed", input="hello", **MODEL)
    (running,) = (await client.get("/api/ps")).json()["models"]
    left_s = (datetime.fromisoformat(running["expires_at"]) - datetime.now(UTC)).total_seconds()
    assert IDLE_S - 60 < left_s <= IDLE_S
    assert (running["name"], running["context_length"], running["size_vram"]) == ("minilm:latest", 64, 0)


@pytest.mark.parametrize("idle_s", [0.0, 1e12, math.inf])
async def test_a_model_that_is_not_unloaded_expires_never(config, scripted, idle_s):
    config = attrs.evolve(config, model_changes=attrs.evolve(config.model_changes, idle_unload_s=idle_s))
    async with serving(config, scripted) as (_, client):
        (running,) = (await client.get("/api/ps")).json()["models"]
    assert running["expires_at"] == "9999-12-31T23:59:59Z"


async def test_a_served_model_is_pulled_at_once(client):
    streamed = await client.post("/api/pull", content=b'{"name": "minilm"}')
    assert (streamed.text, streamed.headers["content-type"]) == ('{"status":"success"}\n', "application/x-ndjson")
    assert await post(client, "/api/pull", model="minilm:latest", stream=False) == {"status": "success"}


async def test_the_version_is_the_server_s(client):
    assert (await client.get("/api/version")).json() == {"version": trio_pool_serve.__version__}
