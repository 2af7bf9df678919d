"""The overload gate: the rules by which an overloaded server refuses requests whose bodies are not decoded.

A server with five times the requests that it can compute refuses four of five. The event loop's time for them is lost
for the others: a scope, an exchange and a decoded body for each would cost several times as much as the refusal itself.
So each rule is applied as early as it can be:

- before a request is read: ``OverloadGate.refuses_unread``,
- before its route: ``OverloadGate.answer_before_route``, and over HTTP/2 ``OverloadGate.answer_without_key``,
- before its body: ``refuse_before_body``, for the body's length and the memory that it would take,
- before a thread decodes it: ``refuse_before_thread``.

Before all of them, ``Connections.refuses`` limits the number of connections. After them, ``Engine.admit`` decides by
the decoded request. Background work is refused by none of them for the time that it would wait.
"""

import math
from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import Any, TypeAlias

import msgspec
import trio
from attrs import define, field, frozen

from trio_pool_serve.api.http.deadline import set_deadline
from trio_pool_serve.api.http.endpoint import DialectEndpoint, WireError
from trio_pool_serve.api.http.json_body import model_named_in
from trio_pool_serve.api.http.middleware import Middleware
from trio_pool_serve.api.http.request import HttpRequest
from trio_pool_serve.api.http.request_body import Buffer
from trio_pool_serve.api.http.request_log import begin_trace, log_request
from trio_pool_serve.api.http.response import HttpResponse
from trio_pool_serve.api.http.route_table import RouteTable
from trio_pool_serve.engine.admission import EstimatedWork, retry_after_s
from trio_pool_serve.errors import AuthenticationError, OverloadedError, PoolServeError
from trio_pool_serve.rendering.memory_budget import Reservation
from trio_pool_serve.service import Service

MAX_LAG_S = 0.25
"""Seconds from a request's arrival to its reading, above which some requests are refused unread."""

REFUSED_AGAIN_S = 1.0
"""Seconds for which an address is refused unread after a refusal; then one request is read, and may be served."""

MAX_ADDRESSES = 4096
"""Maximum number of addresses that are remembered."""

KEPT_S = 0.1
"""Seconds for which a refusal is repeated to requests like the refused one, while some queue stays full.

A refused request takes 121 µs of CPU time then, instead of 262 (``python -m benchmarks.refusal_costs``, "again"). It
is a fiftieth of ``--max-queue-s``, much less than the error of the estimate."""

MAX_KNOWN = 1024
"""Maximum number of refusals that are remembered."""

BYTES_PER_TOKEN = 4
"""Bytes of a small body per token: a token of English text has four or five, and there is JSON around the text."""

MAX_GUESSED_TOKENS = 64
"""Maximum estimate from a body's length: the body may be an image, or more text than the model reads."""

SEARCHED_BYTES = 256 * 1024
"""Maximum length of a body that is searched on the event loop, which takes half a millisecond for each megabyte."""

IMAGE_URL = b'"data:image/'
"""The beginning of an image in a body; images with other URLs are found only by decoding the body."""

PRIORITY = b'"priority"'
"""The field by which a request may be accepted while others of its client are refused: the body is decoded first."""

EarlyResponse: TypeAlias = tuple[int, list[tuple[bytes, bytes]], bytes]
"""Status, headers and body."""


@frozen(eq=False)
class KnownRefusal:
    """A refusal that was made just now, of a request that had waited for ``waited_s``."""

    until: float
    waited_s: float
    error: OverloadedError
    response: HttpResponse


@define(eq=False)
class OverloadGate:
    """Refuses requests for tasks before the app is called: no exchange, no handler, on new connections no task.

    ``task_routes`` are the routes of tasks whose errors can be written before their bodies are decoded.
    """

    _service: Service
    _middleware: Middleware
    _routes: RouteTable
    _task_routes: Collection[str]
    _known: dict[Hashable, KnownRefusal] = field(init=False, factory=dict)
    """Refusals by the key that requests like the refused one have."""
    _refused_at: dict[str, float] = field(init=False, factory=dict)
    """The time of the last refusal, by address."""

    def is_refusing(self, waited_s: float) -> bool:
        """Return whether a queue is so full that requests which have waited for ``waited_s`` may be refused."""
        return not self._service.draining and _is_nearly_full(self._service, waited_s)

    def refuses_unread(self, received: bytes, address: str, waited_s: float) -> bool:
        """Return whether a request is refused unread: a POST from an address that was refused just before.

        Only while the event loop lags: so health checks do not wait for thousands of refusals.
        """
        return (
            waited_s > MAX_LAG_S
            and received.startswith(b"POST ")
            and trio.current_time() - self._refused_at.get(address, -math.inf) < REFUSED_AGAIN_S
            and self.is_refusing(waited_s)
        )

    def note_refused(self, address: str) -> None:
        """Remember that a request of an address was refused as its connection was accepted."""
        _remember(self._refused_at, address, trio.current_time(), MAX_ADDRESSES)

    def answer_before_route(self, scope: Mapping[str, Any], body: bytes) -> EarlyResponse | None:
        """Return the response to a request that every model would refuse; ``None`` if it has to be handled.

        ``body`` is the complete body. The request is not counted for its key.
        """
        request = self._routes.request_of(scope, self._service.config.network.max_body_bytes)
        if scope["method"] != "POST" or request.route not in self._task_routes:
            return None
        request.body.append(body)
        request.body.set_complete()
        try:
            self._middleware.identify(request)
            response = self._refusal_of(request)
        except PoolServeError:
            return None  # for another reason, which the client gets when the request is handled
        request.is_task = True
        return None if response is None else self._finished(request, response)

    def answer_without_key(self, scope: Mapping[str, Any]) -> EarlyResponse | None:
        """Return the response to a request that lacks the API key it needs; ``None`` for others."""
        if not self._service.api_keys.are_needed:
            return None
        request = self._routes.request_of(scope, self._service.config.network.max_body_bytes)
        try:
            self._middleware.identify(request)
        except AuthenticationError as error:
            return self._finished(request, self._middleware.error_response(request, error))
        return None

    def _refusal_of(self, request: HttpRequest) -> HttpResponse | None:
        key = self._key_of(request)
        if key is None:
            return None
        known, now, waited_s = self._known.get(key), trio.current_time(), request.timings.waited_s
        if known is not None and now < known.until and known.waited_s <= waited_s:
            request.error = known.error
            self._service.metrics.count_failure(known.error)
            return known.response
        set_deadline(request, self._service.config.time_limits.request_timeout_s)
        try:
            _refuse(self._service, request, request.body.buffer)
        except OverloadedError as error:
            response = self._middleware.error_response(request, error)
            if msgspec.json.encode(request.request_id)[1:-1] not in _content_of(response):  # it is for others, too
                _remember(self._known, key, KnownRefusal(now + KEPT_S, waited_s, error, response), MAX_KNOWN)
            return response
        return None

    def _key_of(self, request: HttpRequest) -> Hashable:
        """Return a key: requests with equal keys are all refused undecoded, or none. ``None`` if it is unknown.

        It is unknown if the body is large or has a priority.
        """
        body = request.body.buffer
        if not request.body.is_searchable or body.find(PRIORITY) >= 0:
            return None
        model = model_named_in(body) if len(self._service.served) > 1 else None
        client = request.route, request.client.number, request.models, request.header(b"x-request-timeout")
        return *client, model, body.find(IMAGE_URL) >= 0, len(body).bit_length()

    def _finished(self, request: HttpRequest, response: HttpResponse) -> EarlyResponse:
        begin_trace(request, self._service)
        response = self._middleware.finished(request, response)
        log_request(request, self._service)
        return response.status, response.encoded_headers(), _content_of(response)


def errors_agree(candidates: Sequence[DialectEndpoint]) -> bool:
    """Return whether an error can be written for all endpoints of a path at once, before one of them is known."""
    sample = WireError(429, "RateLimitError", "message", None, "id")
    bodies = [candidate.dialect.error_body(sample)[1] for candidate in candidates]
    merged = {name: value for body in bodies for name, value in body.items()}
    return all(merged[name] == value for body in bodies for name, value in body.items())


def refuse_before_body(service: Service, request: HttpRequest, reservation: Reservation) -> None:
    """Refuse a request by the length of its body, and count the body's memory as it arrives. Small bodies pass.

    Raises ``OverloadedError`` if no model could take the request. If the memory is short, the body's ``take`` raises.
    """
    if not request.body.is_small:
        # 423 instead of 498 µs of CPU time for a body of 100 KB, which then holds no memory, either
        # (python -m benchmarks.refusal_costs, "by length").
        _refuse(service, request)
        request.body.hold(reservation)


def refuse_before_thread(service: Service, request: HttpRequest, body: Buffer) -> None:
    """Raise ``OverloadedError`` if a request would wait for too long until a thread decodes it and it is computed.

    Prompts are tokenised in the same threads.
    """
    wait_s, max_queue_s = service.offload.undecoded.wait_s(request.client.number), service.config.scheduling.max_queue_s
    waits_s = wait_s + request.timings.waited_s
    # 0.7 instead of 2.2 ms of CPU time for a body of 100 KB that names the full one of two models
    # (python -m benchmarks.refusal_costs --models 2, "before thread").
    if len(body) <= SEARCHED_BYTES and _is_nearly_full(service, waits_s):
        _refuse(service, request, body, decoding_s=wait_s)
    if wait_s and waits_s > max_queue_s and not request.client.is_background:
        raise OverloadedError(
            f"The queue is full: this request would wait for about {waits_s:.1f} s to be decoded, longer than "
            f"{max_queue_s:g} s (--max-queue-s).",
            retry_after_s=retry_after_s(wait_s, max_queue_s),
        )


def _is_nearly_full(service: Service, waited_s: float) -> bool:
    return any(each.engine.queue.admission.is_refusing(waited_s) for each in service.served.values())


def _refuse(service: Service, request: HttpRequest, body: Buffer | None = None, *, decoding_s: float = 0.0) -> None:
    """Raise ``OverloadedError`` if no model could take a request, or if the model that its body names cannot.

    It is taken to have priority 0; one whose body may have a priority is not refused. Without its body, it may be for
    any model, and have no images. It will wait ``decoding_s`` seconds to be decoded. Background work is never refused.
    """
    if request.client.is_background or (body is not None and body.find(PRIORITY) >= 0):
        return
    work = EstimatedWork(
        tokens=max(1, min(request.body.announced // BYTES_PER_TOKEN, MAX_GUESSED_TOKENS)),
        has_images=body is not None and body.find(IMAGE_URL) >= 0,
        client=request.client,
        deadline=request.deadline,
        waited_s=request.timings.waited_s + decoding_s,
    )
    candidates = service.models.among(request.models)
    if len(candidates) > 1 and body is not None:
        model = model_named_in(body)
        named = service.models.named(model) if model else None
        if named in candidates:
            candidates = [named]
    refusals = []
    for served in candidates:
        try:
            served.refuse_late(work)
        except OverloadedError as refusal:
            refusals.append(refusal)
    if refusals and len(refusals) == len(candidates):
        raise min(refusals, key=lambda refusal: refusal.retry_after_s)


def _content_of(response: HttpResponse) -> bytes:
    assert isinstance(response.body, bytes)  # noqa: S101  (the body of an error is)
    return response.body


def _remember(found: dict[Any, Any], key: Hashable, value: object, most: int) -> None:
    """Put a value into a dictionary, which is emptied before if it is full."""
    if len(found) >= most:
        found.clear()
    found[key] = value
