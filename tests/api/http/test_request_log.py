"""The event of each request, over real HTTP."""

import json
import logging
from collections.abc import AsyncIterator

import attrs
import pytest

from tests.api.serving import connect, serving, until_launching
from tests.conftest import running, until, wait_idle
from tests.tables import each
from trio_pool_serve.service import Service

EMBED = {"input": [[7, 7, 7], [8]]}


@pytest.fixture
async def service(config, scripted, caplog) -> AsyncIterator[Service]:
    caplog.set_level(logging.INFO)
    logged = attrs.evolve(config, logging=attrs.evolve(config.logging, access_log=True))
    async with running(Service(logged, lambda *_: scripted)) as ready:
        yield ready


def events(caplog) -> list[logging.LogRecord]:
    return [record for record in caplog.records if record.getMessage() == "request"]


async def only_event(caplog) -> logging.LogRecord:
    """Return the one event, which is logged once the response has been sent: its client may have it before."""
    await until(lambda: events(caplog))
    (event,) = events(caplog)
    return event


async def test_an_event_tells_who_asked_for_what_and_where_the_time_went(client, config, caplog):
    answer = await client.post("/v1/embeddings?token=SECRET", json=EMBED, headers={"x-request-id": "mine"})
    assert answer.status_code == 200
    event = await only_event(caplog)
    assert (event.method, event.route, event.status, event.outcome) == ("POST", "/v1/embeddings", 200, "answered")
    assert (event.request_id, event.client, event.model) == ("mine", "127.0.0.1", config.sources[0].name)
    assert (event.rows, event.tokens, event.error, event.cancel_reason) == (2, 4, None, None)
    stages = [event.render_ms, event.queue_ms, event.forward_ms, event.copy_ms, event.encode_ms]
    assert 0 < max(stages) < event.total_ms
    assert "SECRET" not in str(vars(event))


@each(
    ("send", "route", "status", "outcome", "error"),
    [
        (("SECRET", "/v1/embeddings"), "/v1/embeddings", 405, "refused", "MethodNotAllowedError"),
        (("GET", "/v1/models"), "/v1/models", 200, "answered", None),
        (("GET", "/v1/models/a/b"), "/v1/models/{name}", 404, "refused", "NotFoundError"),
        (("GET", "/nothing/SECRET"), "other", 404, "refused", "NotFoundError"),
        (("PUT", "/v1/embeddings"), "/v1/embeddings", 405, "refused", "MethodNotAllowedError"),
        (("POST", "/v1/embeddings", {"input": 5}), "/v1/embeddings", 400, "refused", "InvalidRequestError"),
        (("POST", "/v1//embeddings/", {"input": []}), "/v1/embeddings", 400, "refused", "EmptyInputError"),
        (("POST", "/v1/embeddings", {"input": [7], "model": "SECRET"}), "/v1/embeddings", 404, "refused",
         "NotFoundError"),
        (("POST", "/v1/embeddings", {"input": [7], "stream": True}), "/v1/embeddings", 200, "answered", None),
    ],
)  # fmt: skip
async def test_outcomes(client, caplog, send, route, status, outcome, error):
    caplog.clear()
    method, path, *body = send
    answer = await client.request(method, path, json=body[0] if body else None)
    event = await only_event(caplog)
    assert (event.route, event.status, event.outcome, event.error) == (route, status, outcome, error)
    assert answer.status_code == status
    assert event.method == ("other" if method == "SECRET" else method)
    assert event.levelname == "INFO"
    assert "SECRET" not in str(vars(event))


def fail(_):
    raise ValueError("SECRET")


async def test_a_deadline_a_failed_batch_and_a_drain_are_outcomes(client, scripted, service, caplog):
    scripted.gate.clear()
    answer = await client.post("/v1/embeddings", json=EMBED, headers={"x-request-timeout": "0.05"})
    scripted.gate.set()
    event = await only_event(caplog)
    assert (answer.status_code, event.status, event.outcome) == (504, 504, "deadline")
    await wait_idle(service)
    caplog.clear()
    scripted.on_launch = fail
    assert (await client.post("/v1/embeddings", json=EMBED)).status_code == 500
    event = await only_event(caplog)
    assert (event.outcome, event.error, event.levelname) == ("failed", "BatchFailedError", "WARNING")
    caplog.clear()
    service.draining = True
    assert (await client.post("/v1/embeddings", json=EMBED)).status_code == 503
    assert (await only_event(caplog)).outcome == "drained"


async def test_without_the_access_log_only_failures_are_logged(config, scripted, caplog):
    caplog.set_level(logging.INFO)
    async with serving(config, scripted) as (_service, client):
        assert (await client.post("/v1/embeddings", json=EMBED)).status_code == 200
        scripted.on_launch = fail
        assert (await client.post("/v1/embeddings", json=EMBED)).status_code == 500
    assert [event.status for event in events(caplog)] == [500]


async def test_probes_and_scrapes_are_not_logged(client, caplog):
    paths = ("/livez", "/readyz", "/readyz?deep=1", "/health", "/ping", "/", "/v2/health/ready", "/metrics")
    for path in paths:
        assert (await client.get(path)).status_code == 200
    assert (await client.post("/ping")).status_code == 200
    assert (await client.get("/version")).status_code == 200
    assert (await only_event(caplog)).route == "/version"


@pytest.mark.parametrize(("streams", "status"), [(False, None), (True, 200)])
async def test_a_client_that_leaves_is_told_from_one_that_was_answered(url, scripted, caplog, streams, status):
    scripted.gate.clear()
    body = json.dumps({**EMBED, "stream": streams})
    async with await connect(url) as stream:
        head = f"POST /v1/embeddings HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        await stream.send_all((head + body).encode())
        await until_launching(scripted)
        assert not streams or (await stream.receive_some()).startswith(b"HTTP/1.1 200")
    event = await only_event(caplog)
    scripted.gate.set()
    assert (event.status, event.outcome) == (status, "client left")
    assert event.cancel_reason == "the client has disconnected"
    assert (event.rows, event.tokens) == (2, 4)
