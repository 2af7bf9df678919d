"""Several API keys with limits of their own, over real HTTP."""

import contextlib
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from hashlib import sha256
from pathlib import Path

import attrs
import httpx
import pytest
import trio

from tests.api.serving import key_file_of, serving, until_launching
from tests.scripted_runner import ScriptedRunner
from tests.tables import each
from trio_pool_serve.api.http.request import HttpRequest
from trio_pool_serve.app import create_app
from trio_pool_serve.config import BatchConfig, Config
from trio_pool_serve.errors import AuthenticationError, ModelLoadError
from trio_pool_serve.service import Service
from trio_pool_serve.types import Client

EMBED = {"input": [7, 7, 7]}

KEYS = f"""
[plain]
sha256 = "{sha256(b"plain-key").hexdigest()}"
[one-model]
key = "one-model-key"
models = ["second"]
[few]
key = "few-key"
requests_per_minute = 2
[tokens]
key = "tokens-key"
tokens_per_minute = 5
[alone]
key = "alone-key"
max_concurrent_requests = 1
[short]
key = "short-key"
max_body_bytes = 100
[operator]
key = "operator-key"
admin = true
may_outrank = true
"""


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    return key_file_of(tmp_path, KEYS)


def keyed(
    config: Config, runner: ScriptedRunner, key_file: Path | None, **network
) -> AbstractAsyncContextManager[tuple[Service, httpx.AsyncClient]]:
    folder = config.models[0]
    named = attrs.evolve(
        config,
        models=(f"first={folder}", f"second={folder}") if key_file else (folder,),
        network=attrs.evolve(config.network, api_keys_file=key_file, **network),
    )
    return serving(named, runner)


async def embed(client: httpx.AsyncClient, key: str, **fields) -> httpx.Response:
    return await client.post("/v1/embeddings", json={**EMBED, **fields}, headers={"x-api-key": key})


@each(
    ("headers", "status"),
    [
        ({"authorization": "Bearer plain-key"}, 200),
        ({"authorization": "bearer plain-key"}, 200),
        ({"authorization": "plain-key"}, 200),
        ({"x-api-key": "plain-key"}, 200),
        ({"api-key": "plain-key"}, 200),
        ({"authorization": "Basic abc", "x-api-key": "plain-key"}, 200),
        ({"authorization": "Bearer wrong", "api-key": "plain-key"}, 200),
        ({"x-api-key": "Bearer plain-key"}, 401),
        ({"x-api-key": "wrong"}, 401),
        ({"api-key": ""}, 401),
        ({"authorization": "Bearer"}, 401),
        ({"authorization": "Bearer plain-key2"}, 401),
        ({"authorization": "Bearer \xe4".encode("latin-1")}, 401),
        ({"authorization": f"Bearer {sha256(b'plain-key').hexdigest()}"}, 401),
        ({}, 401),
    ],
)
async def test_a_key_may_come_in_the_headers_of_several_products(config, scripted, key_file, headers, status):
    async with keyed(config, scripted, key_file) as (_, client):
        assert (await client.post("/v1/embeddings", json=EMBED, headers=headers)).status_code == status


async def test_models_that_a_key_may_not_use_are_not_there(config, scripted, key_file):
    key = "one-model-key"
    headers = {"x-api-key": key}
    async with keyed(config, scripted, key_file) as (_, client):
        assert (await embed(client, key, model="second")).json()["model"] == "second"
        assert (await embed(client, key)).json()["model"] == "second"
        for hidden in ("first", "nothing"):
            answer = await embed(client, key, model=hidden)
            assert answer.status_code == 404
            assert answer.json()["error"]["message"] == f"The model `{hidden}` does not exist. This server has: second."
            assert (await client.get(f"/v1/models/{hidden}", headers=headers)).status_code == 404
        listed = (await client.get("/v1/models", headers=headers)).json()["data"]
        assert [card["id"] for card in listed] == ["second"]
        assert (await client.get("/info", headers=headers)).json()["served_model_name"] == "second"
        assert (await embed(client, "plain-key", model="first")).status_code == 200


async def test_past_its_requests_per_minute_a_key_is_told_when_to_come_back(config, scripted, key_file):
    async with keyed(config, scripted, key_file) as (service, client):
        answers = [await embed(client, "few-key") for _ in range(3)]
        assert [answer.status_code for answer in answers] == [200, 200, 429]
        wait_ms = int(answers[-1].headers["retry-after-ms"])
        assert 20_000 < wait_ms <= 30_000
        assert int(answers[-1].headers["retry-after"]) == -(-wait_ms // 1000)
        assert (await embed(client, "plain-key")).status_code == 200
        # The clock of the limits is put forward by what the client was told to wait.
        key = service.api_keys.find({b"x-api-key": b"few-key"})
        service.api_keys.usage_of(key).requests.updated -= wait_ms / 1000 + 0.001
        assert (await embed(client, "few-key")).status_code == 200


async def test_tokens_are_counted_for_every_row_even_of_a_request_whose_client_leaves(config, scripted, key_file):
    async with keyed(config, scripted, key_file) as (service, client):
        scripted.gate.clear()
        with trio.move_on_after(60) as leaving:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(embed, client, "tokens-key")
                await until_launching(scripted)
                leaving.cancel()
        scripted.gate.set()
        usage = service.api_keys.usage_of(service.api_keys.find({b"x-api-key": b"tokens-key"}))
        assert usage.tokens.used > 3 - 0.5  # three tokens, less what has been filled up since
        answers = [await embed(client, "tokens-key", input=[[7] * 4, [8] * 4]) for _ in range(2)]
        assert [answer.status_code for answer in answers] == [200, 429]
        assert int(answers[1].headers["retry-after"]) > 30


async def test_running_requests_of_a_key_are_bounded_until_they_are_answered_and_streams_until_their_end(
    config, scripted, key_file
):
    async with keyed(config, scripted, key_file) as (_, client):
        scripted.gate.clear()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(embed, client, "alone-key")
            await until_launching(scripted)
            refused = await embed(client, "alone-key")
            assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
            scripted.gate.set()
        options = {"json": {"input": [7], "stream": True}, "headers": {"x-api-key": "alone-key"}}
        scripted.gate.clear()
        async with client.stream("POST", "/v1/embeddings", **options) as streamed:
            assert (await embed(client, "alone-key")).status_code == 429
            scripted.gate.set()
            await streamed.aread()
        # Refused and failed requests end as well.
        for body in ({"input": 5}, {"input": [7]}, {"input": [7]}):
            assert (await embed(client, "alone-key", **body)).status_code != 429


async def test_a_key_may_have_smaller_bodies(config, scripted, key_file):
    async with keyed(config, scripted, key_file) as (_, client):
        assert (await embed(client, "short-key")).status_code == 200
        assert (await embed(client, "short-key", user="x" * 100)).status_code == 413
        assert (await embed(client, "plain-key", user="x" * 100)).status_code == 200

        async def chunks() -> AsyncIterator[bytes]:
            yield b"x" * 101

        headers = {"x-api-key": "short-key"}
        assert (await client.post("/v1/embeddings", content=chunks(), headers=headers)).status_code == 413


async def test_uploads_have_bounds_of_their_own(config, scripted, key_file, tmp_path):
    """A key's ``max_body_bytes`` is not for the files that it uploads, but ``--max-stored-bytes`` is."""
    batch = BatchConfig(data_dir=tmp_path / "data", max_stored_bytes=10_000)
    async with keyed(attrs.evolve(config, batch=batch), scripted, key_file) as (_, client):
        client.headers["x-api-key"] = "short-key"
        for size, status in ((5000, 200), (5000, 403)):
            form = {"data": {"purpose": "batch"}, "files": {"file": ("a.jsonl", b"x" * size)}}
            assert (await client.post("/v1/files", **form)).status_code == status


async def test_operators_routes_take_a_key_with_admin(config, scripted, key_file):
    async with keyed(config, scripted, key_file) as (_, client):
        for method, path in (("GET", "/metrics"), ("GET", "/metrics/"), ("GET", "/load"), ("POST", "/reset_mm_cache")):
            for key, status in (("operator-key", 200), ("plain-key", 403), ("wrong", 401)):
                answer = await client.request(method, path, headers={"x-api-key": key})
                assert answer.status_code == status, (path, key)


def identified(service: Service, address: str, **headers: str) -> Client:
    """Return the client that a request is taken to be of."""
    given = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    request = HttpRequest({"headers": given, "method": "GET", "client": (address, 1)}, "/v1/models", 1)
    with contextlib.suppress(AuthenticationError):
        create_app(service.config, service).middleware.authenticate(request)
    return request.client


async def test_the_client_of_a_request_is_its_key_or_else_its_address(config, scripted, key_file):
    async with keyed(config, scripted, key_file) as (service, _):
        operator = identified(service, "192.0.2.1", x_api_key="operator-key")
        assert operator == Client("operator", may_outrank=True)
        assert identified(service, "192.0.2.1", x_api_key="plain-key") == Client("plain")
        assert identified(service, "192.0.2.1", x_api_key="wrong") == Client("192.0.2.1")


async def test_without_a_file_a_trusted_proxy_names_the_client_and_several_keys_of_the_flag_are_all_right(
    config, scripted
):
    async with keyed(config, scripted, None, trusted_proxies="127.0.0.1") as (service, _):
        assert identified(service, "127.0.0.1", x_forwarded_for="team") == Client("id:team")
        assert identified(service, "192.0.2.1", x_forwarded_for="team") == Client("192.0.2.1")
    async with keyed(config, scripted, None, api_key="one, two") as (_, client):
        for key, status in (("one", 200), ("two", 200), ("one, two", 401), ("one,", 401), (",", 401)):
            assert (await embed(client, key)).status_code == status, key
        assert (await client.get("/metrics", headers={"authorization": "Bearer two"})).status_code == 200


# -- reading the file again ------------------------------------------------------------------------------------------


async def test_keys_come_and_go_with_the_file_their_usage_stays_and_a_broken_file_changes_nothing(
    config, scripted, key_file, caplog
):
    async with keyed(config, scripted, key_file) as (service, client):
        for _ in range(2):
            await embed(client, "few-key")
        renamed = '"new-key"\nrequests_per_minute = 3'
        key_file.write_text(KEYS.replace('"few-key"\nrequests_per_minute = 2', renamed))
        await service.reload()
        assert (await embed(client, "new-key")).status_code == 200
        # The key of the same name has used two of its three.
        assert (await embed(client, "new-key")).status_code == 429
        assert (await embed(client, "few-key")).status_code == 401
        for broken in ("[a", "[a]\nkey = 'SECRET-KEY'\nmodels = ['none']", None):
            key_file.write_text(broken) if broken else key_file.unlink()
            await service.reload()
            assert (await embed(client, "plain-key")).status_code == 200
        assert caplog.text.count("reloading the API keys failed") == 3
        assert "SECRET-KEY" not in caplog.text


async def test_a_key_is_revoked_while_another_file_is_still_being_read(config, scripted, key_file):
    async with keyed(config, scripted, key_file) as (service, client), trio.open_nursery() as nursery:
        service.reload_hooks.insert(0, trio.sleep_forever)
        key_file.write_text(KEYS.replace("few-key", "new-key"))
        nursery.start_soon(service.reload)
        with trio.fail_after(30):
            while (await embed(client, "few-key")).status_code != 401:
                await trio.lowlevel.checkpoint()
        nursery.cancel_scope.cancel()


async def test_a_broken_file_or_a_key_of_the_flag_in_it_ends_a_server_that_starts(config, scripted, key_file):
    with pytest.RaisesGroup(pytest.RaisesExc(ModelLoadError, match="also set by --api-key")):
        async with keyed(config, scripted, key_file, api_key="few-key"):
            pytest.fail("it serves")
    key_file.write_text("[a")
    with pytest.RaisesGroup(pytest.RaisesExc(ModelLoadError, match="--api-keys-file")):
        async with keyed(config, scripted, key_file):
            pytest.fail("it serves")


# -- models of other keys, on the routes of other products ------------------------------------------------------

OTHERS_MODEL = [
    ("POST", "/api/show", {"model": "first"}),
    ("POST", "/api/show", {"model": "first:latest"}),
    ("POST", "/api/embed", {"model": "first:latest", "input": "hello"}),
    ("POST", "/v1/embeddings", {"model": "first-query", "input": "hello"}),
    ("GET", "/v2/models/first", None),
    ("GET", "/v2/models/first/ready", None),
    ("POST", "/v2/models/first/infer", {"inputs": [{"name": "a", "shape": [1], "datatype": "BYTES", "data": ["a"]}]}),
]


@each(("method", "path", "body"), OTHERS_MODEL)
async def test_a_model_of_other_keys_is_as_unknown_as_one_that_does_not_exist(
    config, scripted, key_file, method, path, body
):
    def unknown(value):
        return None if value is None else {name: each.replace("first", "none") if name == "model" else each
                                           for name, each in value.items()}  # fmt: skip

    key = {"Authorization": "Bearer one-model-key"}
    async with keyed(config, scripted, key_file) as (_, client):
        theirs = await client.request(method, path, json=body, headers=key)
        nobody_s = await client.request(method, path.replace("first", "none"), json=unknown(body), headers=key)
    assert (theirs.status_code, nobody_s.status_code) == (404, 404), theirs.text
    assert theirs.text.replace("first", "none") == nobody_s.text


async def test_lists_and_defaults_of_other_products_have_the_models_of_the_key(config, scripted, key_file):
    key = {"Authorization": "Bearer one-model-key"}
    async with keyed(config, scripted, key_file) as (_, client):
        for path in ("/api/tags", "/api/ps"):
            listed = (await client.get(path, headers=key)).json()["models"]
            assert [model["name"] for model in listed] == ["second:latest"], path
        assert (await client.get("/meta", headers=key)).json()["model"] == "second"


async def test_without_a_key_the_open_list_has_all_models_and_with_one_the_key_s(config, scripted, key_file):
    async with keyed(config, scripted, key_file, api_key_scope="all-but-models") as (_, client):
        for given, names in (
            ({}, ["first", "second"]),
            ({"Authorization": "Bearer wrong"}, ["first", "second"]),
            ({"Authorization": "Bearer one-model-key"}, ["second"]),
        ):
            cards = (await client.get("/v1/models", headers=given)).json()["data"]
            assert [card["id"] for card in cards] == names, given
            assert (await client.get("/v1/models/first", headers=given)).status_code == (200 if len(names) > 1 else 404)
