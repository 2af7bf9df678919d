"""``POST`` and ``DELETE`` of ``/v1/models``: who may use them, and what is refused."""

from pathlib import Path

import pytest
from attrs import evolve

from tests.api.routes.test_openapi import assert_described, document
from tests.api.serving import key_file_of, serving
from tests.serving.changing_models import ADMIN, changing
from tests.tables import each
from trio_pool_serve.cli import check_references, read_config
from trio_pool_serve.config import ModelChangesConfig, NetworkConfig

pytestmark = pytest.mark.unit

KEYS = """
[operator]
key = "operator"
admin = true

[operator-of-b]
key = "operator-of-b"
admin = true
models = ["b"]

[user]
key = "user"
models = ["a", "b"]
"""


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def test_only_keys_with_admin_change_models_and_all_may_list_them(tmp_path: Path):
    async with changing(tmp_path, network=NetworkConfig(api_keys_file=key_file_of(tmp_path, KEYS))) as live:
        client, body = live.client, {"model": str(tmp_path / "b"), "name": "b"}
        for method, path in (("POST", "/v1/models"), ("DELETE", "/v1/models/a")):
            assert (await client.request(method, path, headers=bearer("user"))).status_code == 403
        assert (await client.post("/v1/models", json=body)).status_code == 401
        assert (await client.post("/v1/models", json=body, headers=bearer("operator"))).status_code == 200
        listed = await client.get("/v1/models", headers=bearer("user"))
        assert [card["id"] for card in listed.json()["data"]] == ["a", "b"]
        answer = await client.post("/v1/embeddings", json={"model": "b", "input": "hi"}, headers=bearer("user"))
        assert answer.status_code == 200
        assert (await client.delete("/v1/models/a", headers=bearer("operator-of-b"))).status_code == 404
        other = {"model": str(tmp_path / "c"), "name": "c"}
        assert (await client.post("/v1/models", json=other, headers=bearer("operator-of-b"))).status_code == 403
        assert (await client.delete("/v1/models/b", headers=bearer("operator-of-b"))).status_code == 200


async def test_without_the_setting_there_is_no_such_method(config, scripted):
    config = evolve(config, network=NetworkConfig(api_key="admin-key"))
    async with serving(config, scripted) as (service, client):
        client.headers.update(ADMIN)
        (name,) = service.served
        for method, path in (("POST", "/v1/models"), ("DELETE", f"/v1/models/{name}")):
            refused = await client.request(method, path)
            assert (refused.status_code, refused.headers["allow"]) == (405, "GET, HEAD, OPTIONS")
        assert (await document(client))["paths"]["/v1/models"].keys() == {"get"}


async def test_without_api_keys_nobody_changes_models(config, scripted):
    config = evolve(config, model_changes=ModelChangesConfig(model_api=True))
    async with serving(config, scripted) as (service, client):
        (name,) = service.served
        assert (await client.post("/v1/models", json={"model": name})).status_code == 403
        assert (await client.delete(f"/v1/models/{name}")).status_code == 403


def test_the_command_refuses_the_setting_without_api_keys():
    with pytest.raises(ValueError, match="--model-api requires --api-key"):
        check_references(read_config(["m", "--model-api"]))
    check_references(read_config(["m", "--model-api", "--api-key", "k"]))


@pytest.fixture
async def changed(tmp_path):
    async with changing(tmp_path) as live:
        yield live


B = b'{"model": "b", '

REFUSED = {
    b"": "", b"[]": "", b"{}": "", b'{"model": ""}': "", b'{"model": 1}': "", b'{"model": "\xff"}': "",
    b'{"model": "b\\u0000"}': "", b'{"model": "' + b"x" * 5000 + b'"}': "",
    B + b'"name": ""}': "", B + b'"name": "c\\n"}': "", B + b'"name": "c", "aliases": ["c"]}': "",
    B + b'"name": "/"}': "not only slashes", B + b'"name": "c", "aliases": ["//"]}': "not only slashes",
    B + b'"name": "///", "parent": "a"}': "not only slashes",
    B + b'"aliases": [' + b",".join(b'"%d"' % n for n in range(17)) + b"]}": "",
    B + b'"nmae": "c"}': "Unknown key nmae; accepted: model, aliases, revision",
    B + b'"dtype": "int3"}': "accepted: auto, float32, bfloat16, float16, int8",
    B + b'"max_model_len": "9"}': "", B + b'"max_model_len": 0}': "", B + b'"device": "cpu"}': "",
    B + b'"cache_dir": "/tmp"}': "", B + b'"served_model_name": "c"}': "", B + b'"pooler_config": "x"}': "",
    B + b'"trust_remote_code": true}': "Only the server's own settings can trust a model's code",
    B + b'"trust-remote-code": false}': "Only the server's own settings can trust a model's code",
    B + b'"chat_template": "/etc/passwd"}': "`chat_template` is the template itself",
}  # fmt: skip
"""Bodies, and what is said of them."""


@each(("body", "said"), REFUSED.items())
async def test_a_body_that_is_not_understood_is_refused_before_anything_is_loaded(changed, body, said):
    answer = await changed.client.post("/v1/models", content=body, headers=ADMIN)
    assert (answer.status_code, answer.json()["error"]["type"]) == (400, "BadRequestError")
    assert said in answer.json()["error"]["message"]
    assert changed.loader.loads == {"a": 1}


async def test_a_long_body_is_refused(changed):
    body = b'{"model": "b"' + b" " * 70_000 + b"}"
    assert (await changed.client.post("/v1/models", content=body, headers=ADMIN)).status_code == 413


async def test_a_model_without_a_name_has_that_of_its_folder_which_paths_can_hold(changed):
    folder = str(changed.folder / "b")
    assert (await changed.client.post("/v1/models", json={"model": folder}, headers=ADMIN)).json()["id"] == folder
    assert (await changed.client.get(f"/v1/models/{folder}", headers=ADMIN)).json()["id"] == folder
    assert (await changed.client.delete(f"/v1/models/{folder}", headers=ADMIN)).json()["id"] == folder


async def test_a_model_has_the_settings_of_its_request_also_when_it_is_loaded_again(changed):
    long = " ".join(["hello"] * 20)
    settings = {"max_model_len": 12, "long-text": "truncate", "default_prompt": "world ", "pooling": None}
    assert (await changed.load("b", **settings)).json()["max_model_len"] == 12
    for _ in range(2):
        assert (await changed.embed("b", long)).json()["usage"]["prompt_tokens"] == 12
        assert (await changed.embed("b")).json()["usage"]["prompt_tokens"] == 4
        changed.service.models._begin_unloading(changed.service.served["b"])
        await changed.wait_state("b", "unloaded")
    assert changed.loader.loads["b"] == 2
    assert (await changed.embed("a")).json()["usage"]["prompt_tokens"] == 3


async def test_a_folder_with_a_long_path_requires_a_name(changed):
    folder = f"{changed.folder}/{'./' * 128}b"
    refused = await changed.client.post("/v1/models", json={"model": folder}, headers=ADMIN)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "name")
    assert "256" in refused.json()["error"]["message"]
    assert changed.loader.loads == {"a": 1}
    named = await changed.client.post("/v1/models", json={"model": folder, "name": "b"}, headers=ADMIN)
    assert (named.status_code, changed.loader.loads["b"]) == (200, 1)


async def test_an_unknown_model_or_query_is_refused_and_a_server_that_drains_loads_no_more(changed):
    assert (await changed.unload("none")).status_code == 404
    assert (await changed.unload("a", "?drain=perhaps")).status_code == 400
    assert await changed.states() == {"a": "loaded"}
    changed.service.draining = True
    assert (await changed.load("b")).status_code == 503


async def test_the_card_has_the_time_of_the_last_use_and_the_memory(changed):
    before = (await changed.client.get("/v1/models/a", headers=ADMIN)).json()
    assert "last_used" not in before
    await changed.embed("a")
    card = (await changed.client.get("/v1/models/a", headers=ADMIN)).json()
    assert before["created"] <= card["last_used"] <= before["created"] + 600
    changed.service.served["a"].engine.devices.memory.resident_bytes = 123
    assert (await changed.client.get("/v1/models/a", headers=ADMIN)).json()["memory_bytes"] == 123
    assert await changed.metric('trio_pool_serve_model_memory_bytes{model="a",of="resident"}') == 123


async def test_the_document_lists_the_routes_where_they_are_served(changed):
    changed.client.headers.update(ADMIN)
    assert (await document(changed.client))["paths"]["/v1/models"]["post"]["requestBody"]["required"] is True
    await assert_described(changed.client, changed.service.config, changed.service)
