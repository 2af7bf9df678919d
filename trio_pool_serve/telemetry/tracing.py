"""Traces: a span for each request, exported by OTLP over HTTP. OpenTelemetry is imported only if switched on."""

import os
import time
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any, NoReturn

import trio

from trio_pool_serve.errors import install_extra

OWN = "trio_pool_serve."
W3C = ("traceparent", "tracestate")
EMBEDDING_ROUTES = ("/embeddings", "/embed", "/embed_all", "/embed_sparse", "/multimodalembeddings")

NAMES: Mapping[str, str] = {
    "status": "http.response.status_code",
    "error": "error.type",
    "request_id": f"{OWN}request_id",
    "client": f"{OWN}client",
    "outcome": f"{OWN}outcome",
    "cancel_reason": f"{OWN}cancel_reason",
    "rows": f"{OWN}rows",
    "model": "gen_ai.request.model",
    "tokens": "gen_ai.usage.input_tokens",
}
"""Attributes by the fields of the access log, after OpenTelemetry's semantic conventions.

Names that begin with ``gen_ai.`` are still in development there, and change: only this module uses them.
"""

ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
"""OpenTelemetry's environment variables, each of which switches traces on; the exporter reads them."""

FLUSH_S = 3.0
"""Seconds within which the last spans must be sent when the server ends."""


def is_switched_on() -> bool:
    """Return whether requests are traced. Raises ``ValueError`` if they should be and OpenTelemetry is missing."""
    if not any(os.environ.get(name) for name in ENDPOINTS):
        return False
    if find_spec("opentelemetry") is None or find_spec("opentelemetry.exporter.otlp.proto.http") is None:
        raise ValueError(f"Traces (OTEL_EXPORTER_OTLP_ENDPOINT) require more packages. {install_extra('otel')}")
    return True


class Tracing:
    """Makes spans, and sends them to the endpoint that the environment names.

    The SDK's ``BatchSpanProcessor`` sends up to 512 spans at a time from its own daemon thread, and drops spans once
    2048 are waiting: a slow or missing collector delays no request. The SDK's variables ``OTEL_*`` apply, including
    the variables for sampling; by default the caller's decision counts, and requests without one are sampled.
    """

    def __init__(self) -> None:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        named = {} if "OTEL_SERVICE_NAME" in os.environ else {"service.name": "trio-pool-serve"}
        # ``run`` flushes; the SDK's own flush at exit has no time limit.
        self._provider: Any = TracerProvider(resource=Resource.create(named), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        self._tracer = self._provider.get_tracer("trio_pool_serve")
        self._context = TraceContextTextMapPropagator()

    def start(self, method: str, route: str, headers: Mapping[bytes, bytes]) -> Any:
        """Return a span for a request that begins, a child of the request's ``traceparent``."""
        from opentelemetry.context import Context
        from opentelemetry.trace import SpanKind

        known = {"http.request.method": method, "http.route": route, "url.scheme": "http"}  # for samplers
        if route.endswith(EMBEDDING_ROUTES):
            known["gen_ai.operation.name"] = "embeddings"
        brought = {name: headers[name.encode()].decode("latin1") for name in W3C if name.encode() in headers}
        parent = self._context.extract(brought, Context()) if brought else Context()
        return self._tracer.start_span(f"{method} {route}", parent, SpanKind.SERVER, attributes=known)

    def traceparent_of(self, span: Any) -> str:
        """Return the ``traceparent`` header of a response, which names the span to the client."""
        context = span.get_span_context()
        return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"

    def end(self, span: Any, event: Mapping[str, Any], stages: Mapping[str, float]) -> None:
        """End the span of a request with its ``event`` of the access log.

        A sampled span gets an event for each of the ``stages`` (seconds). Stages of several rows overlap, so only their
        durations are known, and all of the events are at the end of the span.
        """
        from opentelemetry.trace import Status, StatusCode

        if span.is_recording():
            span.set_attributes({name: event[field] for field, name in NAMES.items() if event.get(field) is not None})
            now = time.time_ns()
            for name, seconds in stages.items():
                span.add_event(name, {f"{OWN}duration_ms": seconds * 1e3}, now)
            if event["outcome"] in ("failed", "deadline", "cancelled"):
                span.set_status(Status(StatusCode.ERROR))
        span.end()

    async def run(self) -> NoReturn:
        """Send the last spans when cancelled, for at most ``FLUSH_S``. Cancellation: within that time."""
        try:
            await trio.sleep_forever()
        finally:
            with trio.CancelScope(shield=True), trio.move_on_after(FLUSH_S):
                await trio.to_thread.run_sync(self._provider.shutdown, abandon_on_cancel=True)
