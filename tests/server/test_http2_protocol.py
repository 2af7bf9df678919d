"""HTTP/2 connections: frames that bring nothing, requests without a key, clients that leave."""

import itertools
import json
import struct
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from ipaddress import ip_network
from typing import Any

import attrs
import h2.errors
import h2.events
import h2.settings
import hypercorn.config
import pytest
import trio

from benchmarks.http2_floods import DATA, END_HEADERS, FLOODS, HEADERS, PING, PREFACE, SETTINGS, UNKNOWN, frame
from tests.conftest import running
from tests.scripted_runner import ScriptedRunner
from tests.server.http2_client import Client
from tests.server.served_app import app, connect, served_app
from tests.server.server_process import until
from trio_pool_serve.access.client_labels import ClientLabels
from trio_pool_serve.app import create_app
from trio_pool_serve.config import Config
from trio_pool_serve.server.frame_budget import BURST, BYTES_PER_FRAME, PER_REQUEST, PER_S, FrameBudget
from trio_pool_serve.server.http2_protocol import HEAD_BYTES_PER_FRAME, TURN_S, USUAL_HEAD, Http2Protocol, SingleFrames
from trio_pool_serve.server.listener import hypercorn_config
from trio_pool_serve.server.refusal_writer import RefusalWriter
from trio_pool_serve.server.server_context import ADDRESS_CONNECTIONS, Connections
from trio_pool_serve.service import Service

WASTEFUL = ["resets", "unknown frames", "SETTINGS", "WINDOW_UPDATE", "PING", "PRIORITY", "empty DATA"]
"""Floods of frames that bring nothing."""

GOAWAY, CONTINUATION = 7, 9

CALM = h2.errors.ErrorCodes.ENHANCE_YOUR_CALM.to_bytes(4)
"""The end of such a GOAWAY."""

FAR_AWAY = 10_001
"""The number of a stream after the streams of a flood."""

KEY = ("authorization", "Bearer secret")


class GatedApp:
    """Responds to ``/slow`` once the gate is open, and else once the body has ended; counts what it is called for."""

    def __init__(self) -> None:
        self.gate = trio.Event()
        self.started = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            self.started += 1
            if scope["path"] == "/slow":
                await self.gate.wait()
            while (await receive()).get("more_body", False):
                continue
        await app(scope, receive, send)


@asynccontextmanager
async def serving(
    served: Any = app, *, max_requests: int = 1_000_000, **options: Any
) -> AsyncIterator[Callable[..., Awaitable[Client]]]:
    """Serve an app; give a function that connects to it from an address."""
    settings = hypercorn.config.Config()
    settings.keep_alive_max_requests = max_requests
    async with served_app(served, Connections(**options), settings) as listening, AsyncExitStack() as clients:

        async def connected(address: str = "127.0.0.1") -> Client:
            return Client(await clients.enter_async_context(await connect(listening, address)))

        yield connected


@asynccontextmanager
async def served_client(served: Any = app, **options: Any) -> AsyncIterator[Client]:
    """Serve an app to one client."""
    async with serving(served, **options) as connected:
        yield await connected()


async def send_as_read(client: Client, data: bytes) -> None:
    """Send until all is sent or the server closes the connection."""
    try:
        await client.stream.send_all(data)
    except trio.BrokenResourceError:
        return


@pytest.mark.parametrize("kind", WASTEFUL)
async def test_past_its_budget_a_connection_is_told_to_go_away_once_its_running_request_is_answered(kind):
    """GOAWAY names the last request that is answered; the client can send later ones elsewhere."""
    gated = GatedApp()
    async with served_client(gated) as client:
        running_one = client.begin("/slow")
        await client.send()
        await until(lambda: gated.started == 1)
        flood = FLOODS[kind](running_one + 2) + FLOODS[kind](FAR_AWAY)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(send_as_read, client, flood)
            frames = await frames_until(client.stream, 7)
            gated.gate.set()
            frames += await frames_until(client.stream, None)
            nursery.cancel_scope.cancel(reason="the connection is closed")
    goaways = [payload for number, _, payload in frames if number == 7]
    assert [struct.unpack(">II", each)[1] for each in goaways] == [h2.errors.ErrorCodes.ENHANCE_YOUR_CALM]
    assert struct.unpack(">II", goaways[0])[0] >= running_one
    assert b"ok" in [payload for number, stream, payload in frames if (number, stream) == (DATA, running_one)]


async def frames_until(stream: trio.SocketStream, kind: int | None) -> list[tuple[int, int, bytes]]:
    """Return kind, stream and payload of the frames up to the first of a kind, or until the connection is closed."""
    received, found = b"", []
    with trio.fail_after(30):
        while True:
            while len(received) >= 9 and len(received) >= 9 + (length := int.from_bytes(received[:3])):
                found.append((received[3], int.from_bytes(received[5:9]), received[9 : 9 + length]))
                received = received[9 + length :]
            if kind in [each for each, *_ in found]:
                assert not received, "nothing that the next call would miss"
                return found
            try:
                more = await stream.receive_some()
            except trio.BrokenResourceError:
                more = b""
            if not more:
                return found
            received += more


async def test_a_proxy_that_cancels_a_third_of_its_requests_loses_no_other():
    """10,000 requests over one connection."""
    gated = GatedApp()
    async with served_client(gated) as client:
        for _ in range(200):
            numbers = [client.begin() for _ in range(50)]
            for number in numbers[::3]:
                client.protocol.reset_stream(number, h2.errors.ErrorCodes.CANCEL)
            await client.send()
            for number in set(numbers) - set(numbers[::3]):
                await client.event(h2.events.StreamEnded, number)
            client.events.clear()


async def test_after_its_last_request_a_connection_answers_the_running_ones():
    """hypercorn ends the connection with them."""
    gated = GatedApp()
    async with served_client(gated, max_requests=3) as client:
        slow, *_, late = (client.begin(path) for path in ("/slow", "/", "/slow", "/"))
        await client.send()
        frames = await frames_until(client.stream, 7)
        gated.gate.set()
        frames += await frames_until(client.stream, None)
    answered = {stream for number, stream, payload in frames if payload == b"ok"}
    assert answered == {slow, slow + 2, slow + 4}
    assert late not in answered


async def test_a_connection_of_an_address_that_has_wasted_much_is_closed_only_for_what_it_wastes_itself():
    """Polite clients that share an address with a flood stay connected."""
    async with serving() as connected:
        polite = await connected()
        for _ in range(ADDRESS_CONNECTIONS + 2):
            wasteful = await connected()
            await send_as_read(wasteful, PREFACE + frame(SETTINGS) + int(BURST) * frame(PING, 0, bytes(8)))
            with pytest.raises(EOFError):
                await wasteful.event(h2.events.ConnectionTerminated)
                await wasteful.event(h2.events.ConnectionTerminated)
        for _ in range(5):
            await polite.get()
        late = await connected()
        await late.get()


@pytest.mark.parametrize(("address", "is_closed"), [("127.0.0.1", True), ("127.0.5.1", False)])
async def test_addresses_have_a_budget_and_trusted_proxies_only_one_for_each_connection(address, is_closed):
    """Behind a proxy, a hundred clients have its address."""
    labels, pings = ClientLabels((ip_network("127.0.5.0/24"),)), int(BURST * 0.7) * frame(PING, 0, bytes(8))
    async with serving(labels=labels) as connected:
        clients = [await connected(address) for _ in range(2 * ADDRESS_CONNECTIONS)]
        for client in clients:
            await client.send(pings)
        number = clients[-1].begin()
        await clients[-1].send()
        if is_closed:
            with pytest.raises((EOFError, trio.BrokenResourceError)):
                await clients[-1].event(h2.events.StreamEnded, number)
        else:
            await clients[-1].event(h2.events.StreamEnded, number)


async def test_a_budget_is_regained_by_time(autojump_clock):
    """A connection that lives for days is not closed for a ping each minute."""
    budget = FrameBudget()
    budget.spend(BURST + 1)
    assert budget.is_exceeded
    await trio.sleep(2 / PER_S)
    assert not budget.is_exceeded
    budget.spend(3 * BURST)
    await trio.sleep(BURST / PER_S + 1)
    assert not budget.is_exceeded


@pytest.mark.parametrize(
    ("nbytes", "pings"),
    [(0, int(PER_REQUEST) - 1), (BYTES_PER_FRAME * 30, 30)],
    ids=["completed requests", "bytes of responses"],
)
async def test_a_budget_is_regained_by_work(nbytes, pings):
    async def respond(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await app(scope, receive, send)
            return
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": bytes(nbytes)})

    async with served_client(respond) as client:
        for _ in range(3 * int(BURST) // pings):
            for _ in range(pings):
                client.protocol.ping(bytes(8))
            await client.get()
            client.protocol.increment_flow_control_window(nbytes or 1)


async def test_other_tasks_have_turns_between_the_frames_of_one_read(monkeypatch):
    ticks, seen, count = itertools.count(), [], Http2Protocol._count

    async def counted(self: Http2Protocol, read: Any) -> None:
        time.sleep(2 * TURN_S)  # noqa: ASYNC251  (a large frame takes as long)
        seen.append(next(ticks))
        await count(self, read)

    async def tick() -> None:
        while True:
            next(ticks)
            await trio.lowlevel.checkpoint()

    monkeypatch.setattr(Http2Protocol, "_count", counted)
    async with served_client() as client, trio.open_nursery() as nursery:
        nursery.start_soon(tick)
        await client.send(50 * frame(UNKNOWN))  # without a reply, so nothing waits for the socket
        await client.get()
        nursery.cancel_scope.cancel(reason="the test has ended")
    gaps = [after - before - 1 for before, after in itertools.pairwise(seen)]
    assert len(gaps) > 50
    assert sum(gaps) >= len(gaps) - 2, "about one turn of another task for each frame"


async def test_requests_of_a_client_that_has_left_are_not_begun():
    """What is left in the socket of a flood is thrown away."""
    gated = GatedApp()
    async with serving(gated) as connected:
        client = await connected()
        for _ in range(50):
            client.begin("/slow")
        await client.send()
        await client.stream.aclose()
        other = await connected()
        await other.get()
        assert gated.started == 1


async def test_a_frame_that_is_too_long_is_refused_before_it_has_arrived():
    """Its length would be up to 16 MiB."""
    async with served_client() as client:
        await client.send(b"\xff\xff\xff\x00")
        terminated = await client.event(h2.events.ConnectionTerminated)
        assert terminated.error_code == h2.errors.ErrorCodes.FRAME_SIZE_ERROR


HUFFMAN = b"\x10\x03x-a\xff\x82\x7f" + b"\x18\xc6\x31\x8c\x63" * 3277
"""A header in HPACK's form: 16,385 bytes of Huffman's code for 26,216 times ``a``, never kept in a table."""


async def test_a_head_is_as_long_as_over_http1():
    """Each request is answered for itself; what HPACK would take long to read is not read."""
    gated = GatedApp()
    async with served_client(gated) as client:
        others = client.begin("/slow")
        statuses = {}
        for path, more in (("/" + "a" * 9000, 0), ("/long", 2), ("/right", 1)):
            number = client.begin(path, "GET", *[("x-a", "b" * 9000)] * more)
            await client.send()
            statuses[path[:6]] = await client.status(number)
        assert statuses == {"/aaaaa": b"414", "/long": b"431", "/right": b"200"}
        block = client.protocol.encoder.encode([(":method", "GET"), (":path", "/"), (":scheme", "http")]) + HUFFMAN
        begun = frame(HEADERS, others + 100, block[: 2**14])
        await client.send(begun + frame(CONTINUATION, others + 100, block[2**14 :], END_HEADERS))
        goaway = await client.event(h2.events.ConnectionTerminated)
        assert goaway.error_code == h2.errors.ErrorCodes.FRAME_SIZE_ERROR


async def test_long_heads_count_as_frames_that_bring_nothing():
    """The event loop does nothing else while it reads one."""
    async with served_client() as client:
        for _ in range(int(2 * BURST * HEAD_BYTES_PER_FRAME / (12_000 - USUAL_HEAD))):
            client.begin("/", "GET", ("x-a", "b" * 16_000))  # of 6 bits each
        async with trio.open_nursery() as nursery:
            nursery.start_soon(send_as_read, client, client.protocol.data_to_send())
            frames = await frames_until(client.stream, None)
    assert [payload[4:] for kind, _, payload in frames if kind == GOAWAY] == [CALM]


async def test_settings_are_few_and_those_that_are_unknown_are_dropped():
    """h2 would keep an entry for each of 65,536, and search a table as large as the client likes."""
    frames = SingleFrames()
    frames.max_frame_size = 2**14
    unknown = b"".join(struct.pack(">HI", 100 + number, 5) for number in range(29))
    wanted = struct.pack(">HIHIHI", 1, 2**31 - 1, 4, 2**20, 5, 2**14)
    frames.add_data(PREFACE + frame(SETTINGS, 0, wanted + unknown))
    assert next(frames).settings == {1: 4096, 4: 2**20, 5: 2**14}
    async with served_client() as client:
        await client.send(frame(SETTINGS, 0, struct.pack(">HI", 4, 2**20) * 33))
        goaway = await client.event(h2.events.ConnectionTerminated)
        assert goaway.error_code == h2.errors.ErrorCodes.FRAME_SIZE_ERROR


async def test_a_client_that_says_goodbye_gets_the_responses_to_its_requests():
    gated = GatedApp()
    async with served_client(gated) as client:
        begun = [client.begin("/slow") for _ in range(3)]
        await client.send(frame(GOAWAY, 0, bytes(8)))
        await until(lambda: gated.started == 3)
        gated.gate.set()
        for number in begun:
            await client.event(h2.events.StreamEnded, number)


async def test_bodies_of_single_bytes_count_as_frames_that_bring_nothing():
    """The connection does not wait for the rest of them, but for a request that is running."""
    gated = GatedApp()
    async with served_client(gated) as client:
        running_one, number = client.begin("/slow"), client.begin("/", "POST", ends=False)
        await client.send()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(send_as_read, client, frame(DATA, number, b"x") * int(2 * BURST))
            frames = await frames_until(client.stream, GOAWAY)
            gated.gate.set()
            frames += await frames_until(client.stream, None)
            nursery.cancel_scope.cancel(reason="the connection is closed")
    assert [payload[4:] for kind, _, payload in frames if kind == GOAWAY] == [CALM]
    assert b"ok" in [payload for kind, stream, payload in frames if (kind, stream) == (DATA, running_one)]


async def test_a_body_of_small_pieces_is_not_wasted():
    """As ``json.JSONEncoder.iterencode`` makes them, one request after the other."""
    async with served_client(GatedApp()) as client:
        for _ in range(60):
            number = client.begin("/", "POST", ends=False)
            for piece in ['{"input"', ": ", '["a"', *[', "b"'] * 20, "]", "}"]:
                client.protocol.send_data(number, piece.encode())
            client.protocol.end_stream(number)
            await client.send()
            await client.event(h2.events.StreamEnded, number)


async def test_a_response_that_is_left_incomplete_is_reset():
    """A client would take it for whole otherwise, or wait."""

    async def half(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await app(scope, receive, send)
            return
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"half", "more_body": True})
        raise RuntimeError

    async with served_client(half) as client:
        number = client.begin()
        await client.send()
        assert (await client.event(h2.events.StreamReset, number)).error_code == h2.errors.ErrorCodes.INTERNAL_ERROR


async def test_connect_is_not_supported_and_leaves_nothing():
    """hypercorn kept a request that was no handshake for as long as the connection."""
    connections = Connections()
    async with served_app(app, connections) as listening, await connect(listening) as stream:
        client = Client(stream)
        client.protocol.config.validate_outbound_headers = False
        websocket = [(":protocol", "websocket"), (":scheme", "http"), (":path", "/x")]
        for more in ([], websocket):
            number = client.protocol.get_next_available_stream_id()
            client.protocol.send_headers(number, [(":method", "CONNECT"), (":authority", "x"), *more])
            await client.send()
            assert await client.status(number) == b"501"
        assert connections.open == 1
        await client.get()
        assert client.protocol.remote_settings.enable_connect_protocol == 0


@pytest.mark.parametrize(
    ("sent", "limit_s"),
    [
        (PREFACE[:20], 30), (PREFACE, 30), (PREFACE + frame(SETTINGS), 30),
        (PREFACE + frame(SETTINGS) + frame(HEADERS, 1, b"\x82\x84\x86\x41\x01x"), 30),
        (PREFACE + frame(SETTINGS) + frame(HEADERS, 1, b"\x82\x84\x86\x41\x01x", 5), 75),
    ],
    ids=["half a preface", "a preface", "settings", "half a head", "a request"],
)  # fmt: skip
async def test_a_connection_without_a_request_is_closed_in_time(sent, limit_s, autojump_clock):
    """As over HTTP/1.1; after a request, when it has been idle for as long as any connection may be."""
    async with served_app(app, Connections(client_timeout_s=30)) as listening, await connect(listening) as stream:
        began = trio.current_time()
        await stream.send_all(sent)
        async for _ in stream:
            pass
        assert trio.current_time() - began == pytest.approx(limit_s, abs=2)


async def test_a_path_that_is_not_ascii_ends_its_request_alone():
    """Others share the connection of a proxy."""
    async with served_client() as client:
        client.protocol.config.validate_outbound_headers = False
        wrong, right = client.begin("/\xff"), client.begin()
        await client.send()
        assert (await client.event(h2.events.StreamReset)).stream_id == wrong
        await client.event(h2.events.StreamEnded, right)


async def test_an_upgrade_to_http2_is_ignored():
    """It would be a tunnel for requests that no rule of a proxy sees."""
    async with served_app(app, Connections()) as listening, await connect(listening) as stream:
        upgrade = b"Upgrade: h2c\r\nConnection: Upgrade, HTTP2-Settings\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n"
        for request in (b"GET / HTTP/1.1\r\nHost: x\r\n%s\r\n" % upgrade, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"):
            await stream.send_all(request)
            received = b""
            while not received.endswith(b"\r\n\r\nok"):
                received += await stream.receive_some()
            assert received.startswith(b"HTTP/1.1 200")


# -- API keys ---------------------------------------------------------------------------------------------------


@pytest.fixture
async def keyed(config: Config) -> AsyncIterator[Service]:
    config = attrs.evolve(config, network=attrs.evolve(config.network, api_key="secret"))
    async with running(Service(config, lambda *_: ScriptedRunner())) as ready:
        yield ready


@asynccontextmanager
async def serving_keyed(service: Service, called: list[str] | None = None) -> AsyncIterator[Client]:
    """Serve as ``trio-pool-serve serve`` does; give a client. The paths that the app is called for are ``called``."""
    made = create_app(service.config, service)

    async def app_of_calls(scope: Any, *arguments: Any) -> None:
        if called is not None and scope["type"] == "http":
            called.append(scope["path"])
        await made(scope, *arguments)

    settings = hypercorn_config(service.config)
    async with (
        served_app(app_of_calls, Connections(), settings, refusals=RefusalWriter(made.overload, settings)) as listening,
        await connect(listening) as stream,
    ):
        yield Client(stream)


async def test_a_request_without_its_key_is_answered_without_a_task(keyed):
    """Its body may never come."""
    called: list[str] = []
    async with serving_keyed(keyed, called) as client:
        numbers = [client.begin("/v1/embeddings", "POST", ends=False) for _ in range(50)]
        await client.send()
        for number in numbers:
            assert await client.status(number) == b"401"
            body = await client.event(h2.events.DataReceived, number)
            assert json.loads(body.data)["error"]["message"] == "Send Authorization: Bearer KEY."
        assert called == []
        await client.get("/livez")
        assert called == ["/livez"]


async def test_requests_in_progress_are_limited_as_connections_are():
    """A connection and its first request count once; clients with a few requests each are not touched by others'."""
    gated = GatedApp()
    connections = Connections(max_connections=8)
    async with served_app(gated, connections) as listening, await connect(listening) as stream:
        client = Client(stream)
        begun = [client.begin("/slow") for _ in range(6)]
        await client.send()
        for number in begun[4:]:
            answer = await client.event(h2.events.ResponseReceived, number)
            assert {(b":status", b"503"), (b"retry-after", b"1")} <= {*answer.headers}
        assert (gated.started, connections.open) == (4, 4)
        async with await connect(listening) as same:
            assert (await same.receive_some()).startswith(b"HTTP/1.1 503")
        async with await connect(listening, "127.0.0.2") as other:
            second = Client(other)
            await second.get()
        client.protocol.reset_stream(begun[0])
        await client.send()
        await until(lambda: connections.open == 3)
        later = client.begin("/slow")
        await client.send()
        await until(lambda: gated.started == 6)
        gated.gate.set()
        for number in (*begun[1:4], later):
            await client.event(h2.events.StreamEnded, number)
        assert connections.open == 1
        for _ in range(4):
            client.begin("/", ends=False)
        await client.send()
        await until(lambda: connections.open == 4)
        await client.stream.aclose()
        await until(lambda: connections.open == 0)


async def test_a_shutdown_answers_running_requests_and_says_which_it_will_not():
    """The client can send later ones elsewhere; the connection is closed with the last response.

    GOAWAY comes last: clients that use h2, httpx among them, read nothing after it.
    """
    gated, settings, no_error = GatedApp(), hypercorn.config.Config(), h2.errors.ErrorCodes.NO_ERROR
    settings.graceful_timeout = 1000

    async def see_the_shutdown(idle: Client, busy: Client, begun: list[int]) -> None:
        last = await idle.event(h2.events.ConnectionTerminated)
        assert (last.error_code, last.last_stream_id) == (no_error, 1)
        assert await idle.stream.receive_some() == b""
        late = busy.begin("/slow", ends=False)
        await busy.send()
        assert (await busy.event(h2.events.StreamReset, late)).error_code == h2.errors.ErrorCodes.REFUSED_STREAM
        gated.gate.set()
        for number in begun:
            await busy.event(h2.events.StreamEnded, number)
        assert (await busy.event(h2.events.ConnectionTerminated)).error_code == no_error
        with pytest.raises(EOFError):
            await busy.event(h2.events.StreamEnded, late)

    async with AsyncExitStack() as streams, trio.open_nursery() as nursery:
        nursery.cancel_scope.deadline = trio.current_time() + 30
        async with served_app(gated, Connections(), settings) as listening:
            idle, busy = [Client(await streams.enter_async_context(await connect(listening))) for _ in range(2)]
            await idle.get()
            begun = [busy.begin("/slow") for _ in range(5)]
            await busy.send()
            await until(lambda: gated.started == 1 + len(begun))
            nursery.start_soon(see_the_shutdown, idle, busy, begun)
    assert not nursery.cancel_scope.cancelled_caught
    assert gated.started == 6


async def test_a_request_without_its_key_is_answered_although_the_client_lets_no_body_through(keyed):
    """It would take a task and a place."""
    called: list[str] = []
    async with serving_keyed(keyed, called) as client:
        client.protocol.update_settings({h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: 0})
        numbers = [client.begin("/v1/embeddings", "POST", ends=False) for _ in range(50)]
        await client.send()
        for number in numbers:
            answer = await client.event(h2.events.ResponseReceived, number)
            assert (b":status", b"401") in answer.headers
            assert b"content-length" not in dict(answer.headers)
            await client.event(h2.events.StreamEnded, number)
        assert called == []


async def test_what_follows_of_a_body_whose_request_was_refused_is_thrown_away(keyed):
    """Most clients send their whole body before they read a response; other requests of the connection go on."""
    async with serving_keyed(keyed) as client:
        refused = client.begin("/v1/embeddings", "POST", ends=False)
        await client.send()
        await client.event(h2.events.StreamEnded, refused)
        for sent in range(40):  # more than the windows of stream and connection
            while client.protocol.local_flow_control_window(refused) < 2**14:
                await client.event(h2.events.WindowUpdated)
            client.protocol.send_data(refused, bytes(2**14), end_stream=sent == 39)
            await client.send()
        assert await client.status(await client.post(b'{"input": "a"}', KEY)) == b"200"


async def test_probes_and_the_right_key_are_served_over_http2(keyed):
    """As over HTTP/1.1."""
    async with serving_keyed(keyed) as client:
        for path, headers, status in [("/livez", (), b"200"), ("/v1/models", (KEY,), b"200"), ("/load", (), b"401")]:
            number = client.begin(path, "GET", *headers)
            await client.send()
            assert await client.status(number) == status
