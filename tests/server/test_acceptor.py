"""Requests over new connections that an overloaded server refuses as it accepts them."""

import json
import logging
import re
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import attrs
import httpx
import pytest
import trio
import trio.testing

from tests.conftest import assert_idle, full_queue, running
from tests.server.served_app import served_app
from trio_pool_serve.api.http import overload, task_handler
from trio_pool_serve.api.http.overload import MAX_LAG_S, OverloadGate
from trio_pool_serve.app import create_app
from trio_pool_serve.engine.admission import LOAD_MARGIN, EstimatedWork
from trio_pool_serve.engine.speed import MIN_BATCHES
from trio_pool_serve.errors import OverloadedError
from trio_pool_serve.server import acceptor
from trio_pool_serve.server.acceptor import Acceptor
from trio_pool_serve.server.client_socket import seconds_since_arrival
from trio_pool_serve.server.listener import hypercorn_config
from trio_pool_serve.server.listening_socket import REFUSAL
from trio_pool_serve.server.refusal_writer import RefusalWriter
from trio_pool_serve.server.server_context import Connections
from trio_pool_serve.service import Service
from trio_pool_serve.telemetry import logs
from trio_pool_serve.types import Client

BODY = b'{"input": "hello"}'
HEALTH = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
NEVER_S = 3600.0
CHANGES = {b"date", b"x-request-id", b"server-timing"}
ESTIMATED = {b"content-length", b"retry-after", b"retry-after-ms"}
"""The wait is estimated from the tokens, which are not known before a body is decoded."""


def post(*headers: str, body: bytes = BODY, path: str = "/v1/embeddings") -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: x", f"Content-Length: {len(body)}", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


@attrs.define(eq=False)
class Listening:
    """A server, and for each request that was looked at while it was accepted whether it was refused."""

    where: socket.socket
    refused_early: list[bool]

    async def ask(self, *requests: bytes) -> list[bytes]:
        """Return the responses on one new connection, whose first request has arrived before it is accepted."""
        made = socket.create_connection(self.where.getsockname()[:2])
        made.sendall(requests[0])
        received = []
        with trio.fail_after(10):
            async with trio.SocketStream(trio.socket.from_stdlib_socket(made)) as stream:
                for number, request in enumerate(requests):
                    if number:
                        await stream.send_all(request)
                    received.append(await stream.receive_some())
        return received


@asynccontextmanager
async def serving(service: Service, monkeypatch) -> AsyncIterator[Listening]:
    refused_early = []
    answer = OverloadGate.answer_before_route

    def noting(self, scope, body):
        refusal = answer(self, scope, body)
        refused_early.append(refusal is not None)
        return refusal

    monkeypatch.setattr(OverloadGate, "answer_before_route", noting)
    monkeypatch.setattr(overload, "MAX_LAG_S", NEVER_S)  # on a busy machine any test may lag
    app, settings = create_app(service.config, service), hypercorn_config(service.config)
    refusals = RefusalWriter(app.overload, settings)
    async with served_app(app, Connections.of(service), settings, refusals=refusals) as listening:
        yield Listening(listening, refused_early)


@pytest.fixture
async def server(service, monkeypatch) -> AsyncIterator[Listening]:
    async with serving(service, monkeypatch) as made:
        yield made


def parts_of(response: bytes) -> tuple[bytes, dict[bytes, bytes], bytes]:
    head, _, body = response.partition(b"\r\n\r\n")
    first, *lines = head.split(b"\r\n")
    return first, dict(line.split(b": ", 1) for line in lines), body


async def test_a_refusal_is_the_same_as_that_of_a_request_that_is_handled(server, service):
    with full_queue(service):
        urgent = b'{"input": "hello", "priority": 0}'  # which is decoded first
        early, handled = await server.ask(post("X-Request-Id: a"), post("X-Request-Id: a", body=urgent))
    assert server.refused_early == [True, False]
    (status, headers, body), (other_status, other_headers, other_body) = parts_of(early), parts_of(handled)
    assert status == other_status == b"HTTP/1.1 429 "
    assert list(headers) == list(other_headers)
    assert {name for name in headers if headers[name] != other_headers[name]} - CHANGES <= ESTIMATED
    assert headers[b"x-request-id"] == b"a"
    assert headers[b"retry-after"] == b"30"
    seconds = re.compile(rb"about [0-9.]+ s")
    early_body, other_body = (json.loads(seconds.sub(b"", each)) for each in (body, other_body))
    assert early_body == {"detail": early_body["error"]["message"], **other_body}  # in all dialects of the path
    assert_idle(service)


async def test_a_connection_is_served_on_behind_a_refusal_unless_its_client_closes_it(server, service):
    with full_queue(service):
        refusal, health = await server.ask(post(), HEALTH)
        assert refusal.startswith(b"HTTP/1.1 429")
        assert health.startswith(b"HTTP/1.1 200")
        refusal, end = await server.ask(post("Connection: close"), b"")
        assert b"Connection: close" in refusal
        assert end == b""
    assert server.refused_early == [True, False, True]


@pytest.mark.parametrize("before", ["nothing", "an answer that was waited for", "a probe"])
async def test_requests_over_a_kept_connection_are_refused_early_and_in_their_order(server, service, before):
    made = await trio.open_tcp_stream(*server.where.getsockname()[:2])
    async with made:
        if before != "nothing":
            await made.send_all(HEALTH if before == "a probe" else post())
            assert (await made.receive_some()).startswith(b"HTTP/1.1 200")
        with full_queue(service), trio.fail_after(10):
            for names in ("a", "bcd"):  # several at once
                await made.send_all(b"".join(post(f"X-Request-Id: {name}") for name in names))
                received = b""
                while received.count(b"HTTP/1.1 429") < len(names) or not received.endswith(b"}"):
                    received += await made.receive_some()
                assert re.findall(rb"x-request-id: (\w)", received) == [name.encode() for name in names]
    assert server.refused_early.count(True) == 4
    assert_idle(service)


async def test_a_refusal_is_given_again_only_to_requests_like_it(server, service):
    """Each has an id of its own, and who may not ask is told so; the queue's end ends it at once."""
    with full_queue(service):
        answers = [parts_of((await server.ask(post(f"X-Request-Id: {number}")))[0]) for number in range(3)]
        assert [headers[b"x-request-id"] for _, headers, _ in answers] == [b"0", b"1", b"2"]
        assert len({body for _, _, body in answers}) == 1
        (cohere,) = await server.ask(post("X-Request-Id: mine", path="/v2/embed"))
        assert json.loads(parts_of(cohere)[2])["id"] == "mine"
        (cohere,) = await server.ask(post("X-Request-Id: yours", path="/v2/embed"))
        assert json.loads(parts_of(cohere)[2])["id"] == "yours"
    (answer,) = await server.ask(post())
    assert answer.startswith(b"HTTP/1.1 200")


async def test_refusals_are_counted_and_logged(server, service, caplog):
    caplog.set_level(logging.INFO, logger=logs.logger.name)
    service.access_log.only_failures = False
    counters = service.metrics.requests, service.metrics.failures
    before = [value_of(counter) for counter in counters]
    with full_queue(service):
        await server.ask(post("X-Request-Id: mine"))
    assert server.refused_early == [True]
    assert [value_of(counter) for counter in counters] == [value + 1 for value in before]
    assert [record.request_id for record in caplog.records if record.name == logs.logger.name] == ["mine"]


def value_of(counter) -> float:
    (sample,) = [sample for sample in counter.collect()[0].samples if sample.name.endswith("_total")]
    return sample.value


HANDLED = {
    "a probe": (HEALTH, b"200"),
    "no such path": (post(path="/nothing"), b"404"),
    "a body that is not all there": (post()[:-1], None),
    "half a head": (post()[:30], None),
    "no request": (b"\x16\x03\x01 TLS", b"400"),
    "an urgent request": (post(body=b'{"input": "hello", "priority": -1}'), b"429"),
}


@pytest.mark.parametrize("name", HANDLED)
async def test_anything_but_a_whole_request_for_a_task_is_handled_as_usual(server, service, name):
    request, status = HANDLED[name]
    with full_queue(service):
        if status is None:  # the rest arrives later
            rest = post()[len(request) :]
            made = socket.create_connection(server.where.getsockname()[:2])
            made.sendall(request)
            async with trio.SocketStream(trio.socket.from_stdlib_socket(made)) as stream:
                await trio.testing.wait_all_tasks_blocked()
                await stream.send_all(rest)
                answer, status = await stream.receive_some(), b"429"
        else:
            (answer,) = await server.ask(request)
    assert answer.startswith(b"HTTP/1.1 " + status)
    assert True not in server.refused_early


async def test_requests_without_their_key_are_told_so(config, scripted, monkeypatch):
    network = attrs.evolve(config.network, api_key="secret")
    async with (
        running(Service(attrs.evolve(config, network=network), lambda *_: scripted)) as service,
        serving(service, monkeypatch) as server,
    ):
        with full_queue(service):
            (wrong,), (right,) = [await server.ask(post(f"X-Api-Key: {key}")) for key in ("wrong", "secret")]
    assert wrong.startswith(b"HTTP/1.1 401")
    assert right.startswith(b"HTTP/1.1 429")
    assert server.refused_early == [False, True]


async def test_a_model_that_is_not_ready_is_503_though_another_is_full(config, scripted, monkeypatch):
    two = attrs.evolve(config, models=(f"a={config.models[0]}", f"b={config.models[0]}"))
    async with running(Service(two, lambda *_: scripted)) as service, serving(service, monkeypatch) as server:
        with full_queue(service):
            monkeypatch.setattr(service.served["b"].engine.queue.dispatcher, "is_closed", True)
            for model in ("b", "a"):
                body = b'{"input": "hello", "model": "%b"}' % model.encode()
                answers = await server.ask(post(body=body), HEALTH)
                assert answers[0].startswith(b"HTTP/1.1 503" if model == "b" else b"HTTP/1.1 429")
                assert answers[1].startswith(b"HTTP/1.1 ")
            monkeypatch.undo()


async def test_an_app_that_raises_leaves_the_listener_alone(server, service, monkeypatch, caplog):
    def fail(*_) -> None:
        raise RuntimeError("not expected")

    monkeypatch.setattr(OverloadGate, "answer_before_route", fail)
    with full_queue(service):
        for _ in range(3):
            assert (await server.ask(post()))[0].startswith(b"HTTP/1.1 429")
    assert caplog.text.count("an early refusal failed: RuntimeError") == 3
    assert "not expected" not in caplog.text


async def test_a_request_behind_another_on_its_connection_has_not_waited_for_the_server(service, url, scripted):
    """The client sent it early. What counts is from when the server could have read it."""
    waited = []
    note = task_handler.TaskHandler.__call__

    async def noting(self, request):
        waited.append(request.timings.waited_s)
        return await note(self, request)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(task_handler.TaskHandler, "__call__", noting)
        scripted.gate.clear()
        async with await trio.open_tcp_stream("127.0.0.1", httpx.URL(url).port) as stream:
            await stream.send_all(post() * 2)
            await trio.sleep(0.5)  # time passes: what is tested is that it is not counted
            scripted.gate.set()
            received = b""
            with trio.fail_after(10):
                while received.count(b"HTTP/1.1 200") < 2:
                    received += await stream.receive_some()
    assert len(waited) == 2
    assert max(waited) < 0.25


async def test_a_server_that_drains_says_so_though_its_queue_is_full(server, service):
    with full_queue(service):
        service.draining = True
        (answer,) = await server.ask(post())
    assert answer.startswith(b"HTTP/1.1 503")


def observe_rate(service: Service, *, seconds_per_token: float) -> None:
    for _ in range(MIN_BATCHES):
        service.models.find().engine.queue.dispatcher.rates.observe(
            4, 100, 100 * seconds_per_token / LOAD_MARGIN, left_waiting=True
        )


async def test_connections_soon_after_a_refusal_are_accepted_all_at_once(server, service, monkeypatch):
    monkeypatch.setattr(acceptor, "REFUSING_PAUSE_S", 1.0)
    rounds = []
    accept_some = Acceptor._accept_some

    def counting(self, nursery):
        rounds.append(accept_some(self, nursery))
        return rounds[-1]

    monkeypatch.setattr(Acceptor, "_accept_some", counting)
    closing = post("Connection: close")
    with full_queue(service):
        await server.ask(closing)
        async with trio.open_nursery() as nursery:
            for _ in range(10):
                nursery.start_soon(server.ask, closing)
    assert len(server.refused_early) == 11
    assert rounds == [1.0, 1.0]


# -- when the event loop is behind -------------------------------------------------------------------------


async def ask_a_lagging_server(server: Listening, *asked: tuple[str, bytes]) -> list[bytes]:
    """Return the answers to requests, each from an address, which arrive while the event loop is busy."""
    connections = []
    for address, request in asked:
        made = socket.create_connection(server.where.getsockname()[:2], source_address=(address, 0))
        made.sendall(request)
        connections.append(trio.SocketStream(trio.socket.from_stdlib_socket(made)))
    time.sleep(MAX_LAG_S + 0.1)  # noqa: ASYNC251  (this is what keeps it busy)
    with trio.fail_after(10):
        answers = [await stream.receive_some() for stream in connections]
    for stream in connections:
        await stream.aclose()
    return answers


@pytest.mark.skipif(not hasattr(socket, "TCP_INFO"), reason="Linux tells when data arrived")
async def test_a_lagging_server_refuses_requests_unread_from_addresses_refused_just_before_but_for_one_now_and_then(
    server, service, monkeypatch
):
    monkeypatch.setattr(overload, "MAX_LAG_S", MAX_LAG_S)
    monkeypatch.setattr(overload, "REFUSED_AGAIN_S", NEVER_S)
    with full_queue(service):
        (first,) = await ask_a_lagging_server(server, ("127.0.0.1", post()))
        assert first.startswith(b"HTTP/1.1 429")
        again, health, other = await ask_a_lagging_server(
            server, ("127.0.0.1", post()), ("127.0.0.1", HEALTH), ("127.0.0.2", post())
        )
        assert again == REFUSAL
        assert health.startswith(b"HTTP/1.1 200")
        assert other.startswith(b"HTTP/1.1 429")
        monkeypatch.setattr(overload, "REFUSED_AGAIN_S", 0.0)
        (read,) = await ask_a_lagging_server(server, ("127.0.0.1", post()))
        assert read.startswith(b"HTTP/1.1 429")
        monkeypatch.setattr(overload, "REFUSED_AGAIN_S", NEVER_S)
        monkeypatch.setattr(overload, "MAX_LAG_S", NEVER_S)  # it keeps up again
        (read,) = await server.ask(post())
        assert read.startswith(b"HTTP/1.1 429")
    assert value_of(service.metrics.connections_refused) == 1
    assert_idle(service)


async def test_few_addresses_are_remembered(monkeypatch):
    monkeypatch.setattr(overload, "MAX_ADDRESSES", 2)
    remembering = OverloadGate(None, None, None, ())
    for number in range(5):
        remembering.note_refused(f"127.0.0.{number}")
        assert len(remembering._refused_at) <= 2


# -- how long a request has waited to be read -------------------------------------------------------------


@pytest.fixture
def connected() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        client = socket.create_connection(listening.getsockname())
        with client, listening.accept()[0] as connection:
            yield client, connection


@pytest.mark.skipif(not hasattr(socket, "TCP_INFO"), reason="Linux tells when data arrived")
def test_the_age_of_the_last_bytes_is_known_before_they_are_read(connected):
    client, connection = connected
    client.sendall(b"x")
    time.sleep(0.2)
    assert 0.15 < seconds_since_arrival(connection) < 10
    connection.recv(1)
    assert 0.15 < seconds_since_arrival(connection) < 10
    client.sendall(b"y")
    assert seconds_since_arrival(connection) < 0.15


def test_the_age_is_unknown_at_a_unix_socket():
    one, other = socket.socketpair()
    with one, other:
        one.sendall(b"x")
        assert seconds_since_arrival(other) == 0


async def test_a_request_that_waited_to_be_read_may_wait_less_in_the_queue(server, service):
    """Of five seconds four have passed before the server reads it; what is queued takes two more."""
    engine = service.models.find().engine
    observe_rate(service, seconds_per_token=0.01)
    with engine.admit(EstimatedWork(tokens=200, client=Client("127.0.0.1"))):
        assert engine.refuse_late(EstimatedWork(tokens=200, client=Client("127.0.0.1"))) is None
        late = EstimatedWork(tokens=200, client=Client("127.0.0.1"), waited_s=4.0)
        with pytest.raises(OverloadedError, match=r"about 6\.0 s, longer than 5 s"):
            engine.refuse_late(late)
        assert not engine.queue.admission.is_full()
        assert engine.queue.admission.is_refusing(4.0)
    engine.refuse_late(late)
