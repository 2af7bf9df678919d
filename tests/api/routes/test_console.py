"""The routes of the console; the page itself is used in ``tests/console``."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
import trio
from attrs import evolve

from tests.api.scripted_models import Able, become
from tests.api.serving import connect, key_file_of, serving, until
from tests.conftest import client_of, listening
from trio_pool_serve.api.routes.console import console_files
from trio_pool_serve.app import create_app
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


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


class Viewer:
    """A connection that reads samples for as long as it wants to."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self._stream = stream
        self._rest = b""
        self.headers: dict[str, str] = {}

    async def open(self, path: str, headers: dict[str, str]) -> None:
        lines = [f"GET {path} HTTP/1.1", "Host: x", *(f"{name}: {value}" for name, value in headers.items()), "", ""]
        await self._stream.send_all("\r\n".join(lines).encode())
        while b"\r\n\r\n" not in self._rest:
            self._rest += await self._stream.receive_some()
        head, _, self._rest = self._rest.partition(b"\r\n\r\n")
        status, *fields = head.decode().splitlines()
        assert " 200" in status, head
        self.headers = {name.lower(): value for name, value in (field.split(": ", 1) for field in fields)}

    async def next(self) -> dict[str, Any] | None:
        """Return the next sample, ``None`` once the server has ended the response."""
        while b"\n\n" not in self._rest:
            if self._rest.endswith(b"\r\n0\r\n\r\n") or not (data := await self._stream.receive_some()):
                return None
            self._rest += data
        event, _, self._rest = self._rest.partition(b"\n\n")
        return json.loads(event[event.index(b"data: ") + 6 :])

    async def take(self, count: int) -> list[dict[str, Any]]:
        found = [await self.next() for _ in range(count)]
        return [sample for sample in found if sample is not None]


@asynccontextmanager
async def viewing(client: httpx.AsyncClient, path: str = "/console/live", key: str = "") -> AsyncIterator[Viewer]:
    async with await connect(client.base_url) as stream:
        viewer = Viewer(stream)
        with trio.fail_after(20):
            await viewer.open(path, bearer(key) if key else {})
        yield viewer


async def test_every_file_of_the_page_is_served_with_a_strict_policy(client):
    for name, content_type in console_files().items():
        answer = await client.get(f"/console/{name}".rstrip("/"))
        assert (answer.status_code, answer.headers["content-type"]) == (200, content_type), name
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        head = await client.head(f"/console/{name}".rstrip("/"))
        assert (head.status_code, head.content) == (200, b"")


async def test_only_files_of_the_page_are_served(client):
    for path in ("README.md", "vendor/README.md", "../cli.py", "index.html", "x"):
        assert (await client.get(f"/console/{path}")).status_code == 404, path


async def test_the_page_is_open_and_what_it_shows_needs_a_key_for_all_clients_an_operator_s(keyed):
    for path in ("/console", "/console/app.js"):
        assert (await keyed.get(path)).status_code == 200
    for path in ("/console/live", "/console/models"):
        assert (await keyed.get(path)).status_code == 401
    assert (await keyed.get("/console/models", headers=bearer("user-key"))).status_code == 200
    assert (await keyed.get("/console/live", headers=bearer("user-key"))).status_code == 403
    async with viewing(keyed, key="operator-key") as viewer:
        assert len(await viewer.take(1)) == 1
        for _ in range(3):  # an open page is no running request of its key
            assert (await keyed.get("/console/models", headers=bearer("operator-key"))).status_code == 200


async def test_models_are_described_as_far_as_a_form_depends_on_them(service, client):
    become(service, Able())
    (model,) = (await client.get("/console/models")).json()
    assert model["tasks"] == ["classify", "embed", "score"]
    assert (model["scoring"], model["labels"], model["state"]) == ("late_interaction", ["short", "long"], "loaded")
    assert model["prompts"] == ["classification", "code.query", "document", "query"]


async def test_samples_come_one_after_the_other_are_not_buffered_by_proxies_and_begin_where_a_viewer_asks(client):
    async with viewing(client) as viewer:
        assert viewer.headers["content-type"] == "text/event-stream"
        assert viewer.headers["x-accel-buffering"] == "no"
        assert viewer.headers["cache-control"] == "no-store"
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
        await viewer.next()
        await client.post("/v1/embeddings", json={"input": "hello"})
        found = await viewer.next()
    assert found["requests"] > 0
    assert found["stages"]["request"][0] > 0


async def test_nothing_is_left_of_viewers_who_leave(service, client):
    tasks = trio.lowlevel.current_statistics().tasks_living

    async def look() -> None:
        async with viewing(client) as viewer:
            await viewer.take(1)

    async with trio.open_nursery() as nursery:
        for _ in range(5):
            nursery.start_soon(look)
    await until(lambda: not (service.live.viewers or trio.lowlevel.current_statistics().tasks_living > tasks))
    taken = service.live.taken
    await trio.sleep(1.5)
    assert service.live.taken == taken


async def test_viewers_do_not_keep_a_server_from_ending(service, client):
    async with viewing(client) as viewer:
        await viewer.next()
        service.draining = True
        rest = []
        with trio.fail_after(10):
            while (sample := await viewer.next()) is not None:
                rest.append(sample["state"])
    assert rest[-1] == "draining"
    assert service.live.viewers == 0


async def test_the_page_works_below_a_path(service):
    async with listening(service, create_app(service.config, service), root_path="/x") as url, client_of(url) as client:
        page = await client.get("/x/console")
        assert page.status_code == 200
        for name in console_files():
            assert (await client.get(f"/x/console/{name}".rstrip("/"))).status_code == 200
        assert 'src="/' not in page.text
        assert 'href="/' not in page.text


async def test_a_head_request_ends(service, client):
    with trio.fail_after(20):
        answer = await client.head("/console/live")
    assert (answer.status_code, answer.content) == (200, b"")
    assert service.live.viewers == 0
