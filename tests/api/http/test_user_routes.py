"""Routes that users add to the app, as Quart's blueprints, have what the server's own have."""

from collections.abc import AsyncIterator

import attrs
import pytest
import trio
from quart import Blueprint, Response, abort, redirect, request, websocket

from tests.api.serving import connect
from tests.conftest import client_of, listening, running
from trio_pool_serve.app import create_app
from trio_pool_serve.errors import InvalidRequestError
from trio_pool_serve.service import Service

KEY = {"authorization": "Bearer s3cret"}
MANY_BYTES = 6_000_000


@pytest.fixture
async def guarded(config, scripted) -> AsyncIterator[Service]:
    network = attrs.evolve(config.network, api_key="s3cret", max_body_bytes=MANY_BYTES)
    async with running(Service(attrs.evolve(config, network=network), lambda *_: scripted)) as service:
        yield service


async def one_line_then_silence(left: trio.Event) -> AsyncIterator[str]:
    yield "line\n"
    try:
        await trio.sleep_forever()
    finally:
        left.set()


def blueprint(left: trio.Event) -> Blueprint:
    routes = Blueprint("mine", __name__, url_prefix="/mine")

    @routes.post("/length")
    async def length():
        return {"length": len(await request.get_data())}

    @routes.get("/refuses/<int:status>")
    async def refuses(status: int):
        abort(status)

    @routes.get("/fails")
    async def fails():
        raise KeyError("surprise")

    @routes.get("/invalid")
    async def invalid():
        raise InvalidRequestError("It is wrong.", param="mine")

    @routes.get("/elsewhere")
    async def elsewhere():
        return redirect("/health")

    @routes.get("/cookies")
    async def cookies():
        response = Response("two")
        response.set_cookie("a", "1")
        response.set_cookie("b", "2")
        return response

    @routes.get("/endless")
    async def endless():
        return Response(one_line_then_silence(left))

    @routes.websocket("/socket")
    async def socket():
        await websocket.send("hello")

    return routes


@pytest.fixture
def left() -> trio.Event:
    """Set once the client of the endless stream has disconnected."""
    return trio.Event()


@pytest.fixture
async def mine(guarded, left) -> AsyncIterator[str]:
    app = create_app(guarded.config, guarded)
    app.register_blueprint(blueprint(left))
    async with listening(guarded, app) as url:
        yield url


async def test_they_pass_authentication_get_ids_and_errors_in_the_default_dialect(mine, caplog):
    async with client_of(mine) as client:
        assert (await client.post("/mine/length", content=b"abc")).status_code == 401
        for size in (3, 5_000_000):
            answer = await client.post("/mine/length", content=b"x" * size, headers={**KEY, "x-request-id": "mine"})
            assert answer.json() == {"length": size}
            assert answer.headers["x-request-id"] == "mine"
            assert "server-timing" not in answer.headers
        for path, status, kind in (
            ("/mine/refuses/403", 403, "PermissionDeniedError"),
            ("/mine/refuses/404", 404, "NotFoundError"),
            ("/mine/refuses/503", 503, "ServiceUnavailableError"),
            ("/mine/fails", 500, "InternalServerError"),
            ("/mine/invalid", 400, "BadRequestError"),
            ("/mine/length", 405, "MethodNotAllowedError"),
            ("/mine/nothing", 404, "NotFoundError"),
        ):
            answer = await client.get(path, headers=KEY)
            assert (answer.status_code, answer.json()["error"]["type"]) == (status, kind), path
            assert answer.headers["x-request-id"], path
            assert "surprise" not in answer.text
        assert "surprise" in caplog.text
        assert (await client.get("/mine/length", headers=KEY)).headers["allow"] == "OPTIONS, POST"
        assert (await client.get("/mine/invalid", headers=KEY)).json()["error"]["param"] == "mine"
        too_large = await client.post("/mine/length", content=b"x" * (MANY_BYTES + 1), headers=KEY)
        assert (too_large.status_code, too_large.json()["error"]["type"]) == (413, "PayloadTooLarge")
        moved = await client.get("/mine/elsewhere", headers=KEY)
        assert (moved.status_code, moved.headers["location"]) == (302, "/health")
        assert len((await client.get("/mine/cookies", headers=KEY)).headers.get_list("set-cookie")) == 2
        assert (await client.post("/v1/embeddings", json={"input": "hello"}, headers=KEY)).status_code == 200


async def test_a_stream_ends_when_its_client_disconnects(mine, left):
    async with await connect(mine) as stream:
        await stream.send_all(b"GET /mine/endless HTTP/1.1\r\nHost: x\r\nAuthorization: s3cret\r\n\r\n")
        received = b""
        while b"line" not in received:
            received += await stream.receive_some()
        assert not left.is_set()
    with trio.fail_after(10):
        await left.wait()


@pytest.mark.parametrize(("key", "status"), [(b"Bearer s3cret", b"101"), (b"Bearer other", b"401")])
async def test_websockets_pass_authentication(mine, key, status):
    handshake = (
        b"GET /mine/socket HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
        b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nAuthorization: %b\r\n\r\n"
    )
    async with await connect(mine) as stream:
        await stream.send_all(handshake % key)
        assert (await stream.receive_some()).split(b" ", 2)[1] == status
