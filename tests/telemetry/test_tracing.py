"""Spans as a collector receives them: over a real socket, in protobuf."""

import os
import subprocess
import sys
from collections.abc import AsyncIterator

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from tests.conftest import client_of, listening, running
from tests.server.served_app import app, served_app
from trio_pool_serve.server.server_context import Connections
from trio_pool_serve.service import Service

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
EMBED = {"input": [[7, 7, 7], [8]]}


class Collector:
    """Takes OTLP over HTTP."""

    def __init__(self) -> None:
        self.paths: list[str] = []
        self.requests: list[ExportTraceServiceRequest] = []

    async def __call__(self, scope, receive, send) -> None:
        if scope["type"] == "http":
            parts = [message := await receive()]
            while message["more_body"]:
                parts.append(message := await receive())
            self.paths.append(scope["path"])
            self.requests.append(ExportTraceServiceRequest.FromString(b"".join(part["body"] for part in parts)))
        await app(scope, receive, send)

    @property
    def spans(self) -> list[Span]:
        return [
            span
            for request in self.requests
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]


@pytest.fixture
async def collector(monkeypatch) -> AsyncIterator[Collector]:
    """A collector that services send to. They end before it, and send their last spans then."""
    collector = Collector()
    async with served_app(collector, Connections()) as where:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{where.getsockname()[1]}")
        yield collector


def values_of(span) -> dict[str, object]:
    return {
        item.key: getattr(item.value, item.value.WhichOneof("value"))
        for item in span.attributes
    }  # fmt: skip


async def trace(config, runner, *asked: tuple[dict, dict]) -> list[tuple[int, str]]:
    """Ask a server that traces; return statuses and ``traceparent``."""
    async with (
        running(Service(config, lambda *_: runner)) as service,
        listening(service) as server,
        client_of(server) as client,
    ):
        answers = [await client.post("/v1/embeddings", json=body, headers=headers) for body, headers in asked]
    return [(answer.status_code, answer.headers.get("traceparent", "")) for answer in answers]


async def test_a_request_is_a_span_of_the_trace_that_its_client_began(config, scripted, collector):
    brought = {"traceparent": f"00-{TRACE}-{PARENT}-01", "x-request-id": "mine"}
    ((status, told),) = await trace(config, scripted, (EMBED, brought))
    assert status == 200
    (span,) = collector.spans
    assert collector.paths == ["/v1/traces"]
    assert (span.name, span.kind) == ("POST /v1/embeddings", Span.SPAN_KIND_SERVER)
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE, PARENT)
    assert told == f"00-{TRACE}-{span.span_id.hex()}-01"
    assert span.start_time_unix_nano < span.end_time_unix_nano
    expected = {
        "http.request.method": "POST",
        "http.route": "/v1/embeddings",
        "http.response.status_code": 200,
        "gen_ai.operation.name": "embeddings",
        "gen_ai.request.model": config.sources[0].name,
        "gen_ai.usage.input_tokens": 4,
        "trio_pool_serve.rows": 2,
        "trio_pool_serve.outcome": "answered",
        "trio_pool_serve.request_id": "mine",
    }
    assert expected.items() <= values_of(span).items()
    assert [event.name for event in span.events] == ["render", "queue", "forward", "copy", "encode"]
    (resource,) = collector.requests[0].resource_spans
    assert {"service.name": "trio-pool-serve"}.items() <= values_of(resource.resource).items()


async def test_errors_are_marked_and_no_input_is_sent(config, scripted, collector):

    def fail(_):
        raise ValueError("SECRET")

    scripted.on_launch = fail
    wrong = {"input": "SECRET", "dimensions": 0}
    answers = await trace(config, scripted, (EMBED, {}), (wrong, {"traceparent": "SECRET"}))
    failed, refused = sorted(collector.spans, key=lambda span: span.start_time_unix_nano)
    assert [status for status, _ in answers] == [500, 400]
    assert failed.status.code == Status.STATUS_CODE_ERROR
    assert values_of(failed)["error.type"] == "BatchFailedError"
    assert refused.status.code == Status.STATUS_CODE_UNSET
    assert values_of(refused)["error.type"] == "InvalidRequestError"
    assert failed.trace_id != refused.trace_id
    assert not any(b"SECRET" in request.SerializeToString() for request in collector.requests)


async def test_a_caller_may_leave_a_request_out_of_its_traces(config, scripted, collector):
    ((status, told),) = await trace(config, scripted, (EMBED, {"traceparent": f"00-{TRACE}-{PARENT}-00"}))
    assert (status, told[:36], told[-3:]) == (200, f"00-{TRACE}-", "-00")
    assert not collector.spans


async def test_a_collector_that_is_gone_holds_up_neither_a_request_nor_the_end(config, scripted, monkeypatch):
    monkeypatch.setattr("trio_pool_serve.telemetry.tracing.FLUSH_S", 0.01)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    answers = await trace(config, scripted, *[(EMBED, {})] * 3)
    assert [status for status, _ in answers] == [200] * 3


async def test_opentelemetry_s_own_variables_decide(config, scripted, collector, monkeypatch):
    """An endpoint for traces is used as it is, the name of the service instead of the server's."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", f"{os.environ['OTEL_EXPORTER_OTLP_ENDPOINT']}/mine")
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    await trace(config, scripted, (EMBED, {}))
    assert collector.paths == ["/mine"]
    (request,) = collector.requests
    assert values_of(request.resource_spans[0].resource)["service.name"] == "mine"


def test_off_it_is_not_even_imported(scripted_folder):
    program = (
        "import sys; from trio_pool_serve.config import Config; from trio_pool_serve.service import Service\n"
        f"assert Service(Config(models=({str(scripted_folder)!r},))).tracing is None\n"
        "sys.exit(any(name.startswith('opentelemetry') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
