"""What clients of several products find out about a server before they send work."""

import logging

import attrs
import pytest

from tests.api.scripted_models import Able, Everything, Judge, Labeller, serve_as
from tests.api.serving import serving
from tests.tables import each


@each(
    ("spec", "told"),
    [(Able(), "embedding"), (Everything(), "embedding"), (Judge(), "rerank"), (Labeller(), "classifier")],
)
async def test_the_list_of_models_tells_what_each_is_for_and_how_long_inputs_may_be(client, service, spec, told):
    serve_as(service, spec)
    (card,) = (await client.get("/v1/models")).json()["data"]
    names = ("model_type", "max_tokens", "context_length", "max_model_len")
    assert [card[name] for name in names] == [told, 64, 64, 64]
    assert (await client.get(f"/v1/models/{card['id']}")).json() == card


@pytest.mark.parametrize("key", [None, "s3cret"])
async def test_xinference_s_clients_are_told_whether_they_need_a_key(config, scripted, key):
    config = attrs.evolve(config, network=attrs.evolve(config.network, api_key=key))
    async with serving(config, scripted) as (_, client):
        answer = await client.get("/v1/cluster/auth")
    assert (answer.status_code, answer.json()) == (200, {"auth": key is not None})


async def test_xinference_s_and_voyage_s_clients_find_the_message_under_detail(client):
    for path in ("/v1/embeddings", "/v1/rerank", "/v1/models/none"):
        answer = await (client.get(path) if "models" in path else client.post(path, json={"model": "none"}))
        assert answer.json()["detail"] == answer.json()["error"]["message"], path


async def test_weaviate_is_told_the_name_of_the_default_model(client, config):
    assert (await client.get("/meta")).json()["model"] == config.models[0]


async def test_a_doubled_version_is_answered_and_logged_once(client, caplog):
    with caplog.at_level(logging.WARNING, "trio_pool_serve.api.http.route_table"):
        for path in ("/v1/v1/embeddings", "/v1//v1/embeddings/", "/v1/v1/rerank"):
            assert (await client.post(path, json={"input": "hello"})).status_code == (400 if "rerank" in path else 200)
        assert (await client.get("/v1/v1/models")).status_code == 200
        assert (await client.post("/v1/v2/embed", json={"texts": ["hello"]})).status_code == 200
        assert (await client.get("/v1/api/version")).status_code == 200
        assert (await client.get("/v1/v1/v1/models")).status_code == 404
        assert (await client.post("/v1/pooling", json={"input": "hello"})).status_code == 404
        assert (await client.get("/v1/v1/nothing")).status_code == 404
    assert [record.getMessage() for record in caplog.records if "base URL" in record.getMessage()] == [
        "a client requests /v1/v1/embeddings instead of /v1/embeddings: its base URL must not end in /v1"
    ]


async def test_the_open_inference_protocol_s_server_is_described(client):
    answer = (await client.get("/v2")).json()
    assert (answer["name"], answer["extensions"]) == ("trio_pool_serve", [])
