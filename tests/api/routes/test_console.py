"""The routes of the console; the page itself is used in ``tests/console``."""

import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
import trio
from attrs import define, evolve

from tests.api.scripted_models import Able, become
from tests.api.serving import connect, key_file_of, serving
from tests.conftest import client_of, listening, until
from trio_pool_serve.api.routes.console import console_files
from trio_pool_serve.config import NetworkConfig

KEYS = """
[operator]
key = "operator-key"
admin = true
max_concurrent_requests = 1

[user]
key = "user-key"
"""


@pytest.fixture
async def keyed(config, scripted, tmp_path) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a server with the keys of an operator and of a user."""
    config = evolve(config, network=NetworkConfig(api_keys_file=key_file_of(tmp_path, KEYS)))
    async with serving(config, scripted) as (_, client):
        yield client


@define
class Viewer:
    """A connection that reads samples for as long as it wants to."""

    stream: trio.SocketStream
    head: bytes = b""
    received: bytes = b""

    async def read_to(self, end: bytes) -> bytes:
        """Return what comes before ``end``, or before the server ends the response."""
        while end not in self.received and (data := await self.stream.receive_some()):
            self.received += data
        found, _, self.received = self.received.partition(end)
        return found

    async def take(self, count: int) -> list[dict[str, Any]]:
        """Return the next samples, fewer once the server has ended the response."""
        events = [await self.read_to(b"\n\n") for _ in range(count)]
        return [json.loads(event.removeprefix(b"data: ")) for event in events if event]


@asynccontextmanager
async def viewing(client: httpx.AsyncClient, path: str = "/console/live", key: str = "") -> AsyncIterator[Viewer]:
    async with await connect(client.base_url) as stream:
        await stream.send_all(f"GET {path} HTTP/1.0\r\nHost: x\r\nX-Api-Key: {key}\r\n\r\n".encode())
        viewer = Viewer(stream)
        with trio.fail_after(20):
            viewer.head = await viewer.read_to(b"\r\n\r\n")
        assert b" 200 " in viewer.head
        yield viewer


async def test_the_files_of_the_page_and_no_others_are_served_with_a_strict_policy(client):
    for name, content_type in console_files().items():
        answer = await client.get(f"/console/{name}".rstrip("/"))
        assert (answer.status_code, answer.headers["content-type"]) == (200, content_type), name
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
    for path in ("README.md", "vendor/README.md", "../cli.py", "index.html", "x"):
        assert (await client.get(f"/console/{path}")).status_code == 404, path


async def test_the_page_is_open_and_what_it_shows_needs_a_key_for_all_clients_an_operator_s(keyed):
    for path in ("/console", "/console/app.js"):
        assert (await keyed.get(path)).status_code == 200
    for path, of_user in (("/console/live", 403), ("/console/models", 200)):
        assert (await keyed.get(path)).status_code == 401
        assert (await keyed.get(path, headers={"x-api-key": "user-key"})).status_code == of_user
    async with viewing(keyed, key="operator-key") as viewer:
        assert len(await viewer.take(1)) == 1
        for _ in range(3):  # an open page is no running request of its key
            assert (await keyed.get("/console/models", headers={"x-api-key": "operator-key"})).status_code == 200


async def test_models_are_described_as_far_as_a_form_depends_on_them(service, client):
    become(service, Able())
    (model,) = (await client.get("/console/models")).json()
    assert (model["tasks"], model["task"]) == (["classify", "embed", "score"], "embed")
    assert (model["scoring"], model["labels"], model["state"]) == ("late_interaction", ["short", "long"], "loaded")
    assert model["prompts"] == ["classification", "code.query", "document", "query"]


async def test_samples_come_one_after_the_other_are_not_buffered_by_proxies_and_begin_where_a_viewer_asks(client):
    async with viewing(client) as viewer:
        headers = {"content-type: text/event-stream", "x-accel-buffering: no", "cache-control: no-store"}
        assert headers <= {*viewer.head.decode().split("\r\n")}
        found = await viewer.take(3)
    assert [sample["number"] for sample in found] == [1, 2, 3]
    assert all(sample["state"] == "ready" for sample in found)
    (server,) = found[0]["processes"].values()
    assert server["memory_bytes"] > 10 * 2**20
    async with viewing(client, "/console/live?after=1") as viewer:
        assert (await viewer.take(1))[0]["number"] == 2
    for wrong in ("x", "-1"):
        assert (await client.get(f"/console/live?after={wrong}")).status_code == 400


async def test_a_request_is_counted_in_the_next_sample(client):
    async with viewing(client) as viewer:
        await viewer.take(1)
        await client.post("/v1/embeddings", json={"input": "hello"})
        (found,) = await viewer.take(1)
    assert found["requests"] > 0
    assert found["stages"]["request"][0] > 0


async def test_nothing_is_left_of_viewers_who_leave(service, client):
    tasks = trio.lowlevel.current_statistics().tasks_living

    async with viewing(client) as one, viewing(client) as other:
        assert await one.take(1) == await other.take(1)
    await until(lambda: trio.lowlevel.current_statistics().tasks_living <= tasks)


async def test_viewers_do_not_keep_a_server_from_ending(service, client):
    async with viewing(client) as viewer:
        await viewer.take(1)
        service.draining = True
        with trio.fail_after(10):
            rest = await viewer.take(100)
    assert rest[-1]["state"] == "draining"
    assert not service.live._turn.locked(), "a viewer still waits for a sample"


async def test_the_page_works_below_a_path(service):
    async with listening(service, root_path="/x") as url, client_of(url) as client:
        for name in console_files():
            assert (await client.get(f"/x/console/{name}".rstrip("/"))).status_code == 200
        assert not re.search('(src|href)="/', (await client.get("/x/console")).text)


async def test_a_head_request_ends(service, client):
    with trio.fail_after(20):
        assert (await client.head("/console/live")).status_code == 200
    assert not service.live._turn.locked(), "a viewer still waits for a sample"
