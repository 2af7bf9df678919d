"""The app that the command serves answers as Quart's does, and is Quart's if a plugin has routes."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import attrs
import httpx
import pytest
import trio
from quart import Blueprint

from tests.conftest import client_of, listening, running
from trio_pool_serve.app import BLUEPRINTS, create_app
from trio_pool_serve.config import NetworkConfig
from trio_pool_serve.served_app import ServedApp
from trio_pool_serve.server.listener import serve_listeners
from trio_pool_serve.server.listening_socket import open_listening_socket, url_of
from trio_pool_serve.service import Service

NOTHING = [("GET", "/nothing"), ("POST", "/v1/embedding"), ("OPTIONS", "/nothing"), ("GET", "/static/a")]

HANDSHAKE = (
    b"GET %b HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nX-Request-Id: a\r\n%b"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)


@pytest.fixture
async def guarded(config, scripted) -> AsyncIterator[Service]:
    network = attrs.evolve(config.network, api_key="s3cret")
    async with running(Service(attrs.evolve(config, network=network), lambda *_: scripted)) as service:
        yield service


async def test_a_path_without_a_route_is_refused_as_by_quart(service):
    answers = []
    for app in (create_app(service.config, service), ServedApp(service.config, service)):
        async with listening(service, app) as url, client_of(url) as client:
            found = [await client.request(*request, headers={"x-request-id": "a"}) for request in NOTHING]
            answers.append([(one.status_code, {**one.headers, "date": ""}, one.content) for one in found])
    assert answers[0] == answers[1]
    assert {status for status, _, _ in answers[0]} == {404}


KEY = b"Authorization: Bearer s3cret\r\n"


@pytest.mark.parametrize(
    ("path", "key", "status"),
    [(b"/nothing", b"", b"401"), (b"/nothing", KEY, b"404"), (b"/v1/embeddings", KEY, b"405")],
)
async def test_a_websocket_is_refused_as_by_quart(guarded, path, key, status):
    answers = []
    for app in (create_app(guarded.config, guarded), ServedApp(guarded.config, guarded)):
        async with (
            listening(guarded, app) as url,
            await trio.open_tcp_stream("127.0.0.1", httpx.URL(url).port) as stream,
        ):
            await stream.send_all(HANDSHAKE % (path, key))
            received = b""
            with trio.fail_after(10):
                while b"\r\n\r\n" not in received or not received.partition(b"\r\n\r\n")[2]:
                    received += await stream.receive_some()
            head, _, body = received.partition(b"\r\n\r\n")
            lines = [line.lower() for line in head.split(b"\r\n") if not line.lower().startswith(b"date:")]
            answers.append((sorted(lines), body))
    assert answers[0] == answers[1]
    assert b"http/1.1 %b " % status in answers[0][0]


@asynccontextmanager
async def served(service: Service) -> AsyncIterator[httpx.AsyncClient]:
    stop = trio.Event()
    network = NetworkConfig(port=0)
    with open_listening_socket(network) as socket:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(serve_listeners, service.config, service, socket, stop)
            async with client_of(url_of(socket, network)) as client:
                yield client
            stop.set()


async def test_blueprints_of_plugins_are_served(service, monkeypatch):
    routes = Blueprint("mine", __name__)

    @routes.get("/mine")
    async def mine():
        return "hello"

    async with served(service) as client:
        assert (await client.get("/mine")).status_code == 404
    monkeypatch.setattr("trio_pool_serve.server.listener.BLUEPRINTS", [routes])
    monkeypatch.setattr("trio_pool_serve.app.BLUEPRINTS", [routes])
    assert BLUEPRINTS == []
    async with served(service) as client:
        assert (await client.get("/mine")).text == "hello"
        assert (await client.get("/livez")).status_code == 200
