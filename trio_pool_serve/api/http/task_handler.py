"""Handles a request for a task: decodes its body, and calls the endpoint under a deadline."""

import time
from collections.abc import Hashable, Sequence
from functools import partial

import msgspec
import trio
from attrs import define, evolve, field

from trio_pool_serve.api.http.deadline import set_deadline
from trio_pool_serve.api.http.endpoint import Call, Dialect, DialectEndpoint, WireError
from trio_pool_serve.api.http.endpoint_choice import (
    CandidatesOf,
    DecodedBody,
    PathByFields,
    decode_body,
    endpoints_by_path,
    model_named_by,
)
from trio_pool_serve.api.http.json_body import decode_json, is_quick_to_decode, model_named_in, require_json_type
from trio_pool_serve.api.http.request import HttpRequest
from trio_pool_serve.api.http.request_body import Buffer
from trio_pool_serve.api.http.response import HttpResponse
from trio_pool_serve.api.http.route_table import Routes, name_in_path
from trio_pool_serve.engine.admission import EstimatedWork, retry_after_s
from trio_pool_serve.errors import DeadlineExceededError, OverloadedError
from trio_pool_serve.rendering.memory_budget import Reservation
from trio_pool_serve.service import Service
from trio_pool_serve.tasks.request_context import RequestContext

BYTES_PER_TOKEN = 4
"""Of a small body: a token of English text has four or five, and there is JSON around the text."""

MAX_GUESSED_TOKENS = 64
"""No more are guessed from a body's length: it may be an image, or more text than the model reads."""

SEARCHED_BYTES = 256 * 1024
"""Larger bodies are not searched on the event loop, which would take half a millisecond for each megabyte."""

IMAGE_URL = b'"data:image/'
"""A body with this has images; images with other URLs are found only by decoding it."""

PRIORITY = b'"priority"'
"""A body with this may be taken where others of its client are refused, so it is decoded first."""


def task_routes(service: Service, dialects: Sequence[Dialect], by_fields: PathByFields) -> Routes:
    """Return the routes of all dialects, and the one ``by_fields``."""
    by_path = endpoints_by_path(dialects)

    def candidates_of(body: Buffer | bytes) -> Sequence[DialectEndpoint]:
        return by_path[by_fields.path_of(decode_json(body, dict[str, msgspec.Raw]), service)]

    routes = {("POST", path): TaskHandler(service, candidates) for path, candidates in by_path.items()}
    return {**routes, ("POST", by_fields.path): TaskHandler(service, by_path[by_fields.targets[0]], candidates_of)}


@define(eq=False)
class TaskHandler:
    """The handler of a path that the ``candidates`` share, or the endpoints that ``candidates_of`` returns for a body.

    It runs under a deadline, the server's or the client's ``X-Request-Timeout`` (seconds) if that is sooner; past it
    ``DeadlineExceededError`` is raised.
    """

    service: Service
    candidates: Sequence[DialectEndpoint]
    candidates_of: CandidatesOf | None = None
    _errors_agree: bool = field(init=False)

    @_errors_agree.default
    def _writes_for_all(self) -> bool:
        # Whether an error can be written for all endpoints at once, before one of them is known.
        sample = WireError(429, "RateLimitError", "message", None, "id")
        bodies = [candidate.dialect.error_body(sample)[1] for candidate in self.candidates]
        merged = {name: value for body in bodies for name, value in body.items()}
        return all(merged[name] == value for body in bodies for name, value in body.items())

    def likeness_of(self, request: HttpRequest) -> Hashable:
        """Return a key: requests of a client with equal keys are all refused undecoded, or none. ``None`` if unknown.

        It is unknown until the whole body has arrived, if the body is large or has a priority, and if the dialects
        write errors differently.
        """
        body = request.body.buffer
        if not (self._errors_agree and request.body.is_searchable) or body.find(PRIORITY) >= 0:
            return None
        model = model_named_in(body) if len(self.service.served) > 1 else None
        return model, body.find(IMAGE_URL) >= 0, len(body).bit_length(), request.header(b"x-request-timeout")

    def refuse_undecoded(self, request: HttpRequest) -> None:
        """Raise ``OverloadedError`` if no model could take a request, or if the model that its body names cannot."""
        set_deadline(request, self.service.config.time_limits.request_timeout_s)
        _refuse(self.service, request, request.body.buffer)

    async def __call__(self, request: HttpRequest) -> HttpResponse:
        """Return the response. Cancellation: at once; work that threads have begun is finished."""
        service = self.service
        request.is_task = True
        service.require_open()
        timeout_s = set_deadline(request, service.config.time_limits.request_timeout_s)
        reservation = Reservation(service.memory, request.client)
        request.at_end.append(reservation.release)
        response: HttpResponse | None = None
        service.running_tasks += 1
        try:
            with trio.CancelScope(deadline=request.deadline):  # a third less than ``trio.fail_at``
                response = await self._respond(request, reservation)
        finally:
            if response is None:
                reservation.release()
            if response is None or isinstance(response.body, bytes):
                service.running_tasks -= 1
        if response is None:
            raise DeadlineExceededError(f"The deadline of {timeout_s:g} s has passed.")
        if isinstance(response.body, bytes):
            request.wire = None
            reservation.settle(len(response.body))
            service.metrics.total.observe(request.timings.total_s)
        else:
            request.at_end.append(partial(self._end_stream, request))
        return response

    def _end_stream(self, request: HttpRequest) -> None:
        self.service.running_tasks -= 1
        if request.cancel_reason is None:
            self.service.metrics.total.observe(request.timings.total_s)

    async def _respond(self, request: HttpRequest, reservation: Reservation) -> HttpResponse:
        service = self.service
        if not request.body.is_small:
            # 423 instead of 498 µs of CPU time for a body of 100 KB, which then holds no memory, either
            # (python -m benchmarks.refusal_costs, "by length").
            _refuse(service, request)
            request.body.hold(reservation)
        decoded = await self._decoded(request)
        claimed_by, wire = request.claimed_by, request.wire = decoded.claimed_by, decoded.wire
        if decoded.error is not None:
            raise decoded.error
        in_path = name_in_path(request.route, request.path)
        name, suffix = model_named_by(decoded, service.models, among=request.models, in_path=in_path)
        with service.models.use(name, among=request.models) as use:
            began = time.perf_counter()
            model = await service.models.loaded(use)
            request.timings.load_s = time.perf_counter() - began
            if getattr(wire, "cache_salt", None) is not None:
                model = evolve(model, results=None)  # it keeps clients apart, so no outputs are shared
            request.model = model.name
            call = Call(
                wire=wire,
                job=decoded.job,
                model=model,
                service=service,
                context=RequestContext(request.timings, request.client, request.deadline, reservation),
                request_id=request.request_id,
                claimed_by=claimed_by,
                created=request.created,
                model_suffix=suffix,
            )
            response = await claimed_by.endpoint.respond(call)
            request.fingerprint = model.computed_by.fingerprint
            if not isinstance(response.body, bytes):
                use.outlives_context = True
                request.at_end.append(use.end)
        return response

    async def _decoded(self, request: HttpRequest) -> DecodedBody:
        """Receive the body of a request, and decode it: on the loop only if it is small.

        Raises ``UnsupportedMediaTypeError``, ``BodyTimeoutError``, ``PayloadTooLargeError`` and ``OverloadedError``.
        Cancellation: at once while the body arrives; decoding that has begun is finished.
        """
        if not self.candidates[0].dialect.ignores_content_type:
            require_json_type(request)
        body = await request.body.take(self.service.config.time_limits.client_timeout_s)
        if is_quick_to_decode(body):
            return self.decode(body)
        _refuse_before_hop(self.service, request, body)
        began = time.perf_counter()
        decoded = await self.service.offload.decode(request.client.number, partial(self.decode, body))
        request.timings.waited_s += time.perf_counter() - began
        return decoded

    def decode(self, body: Buffer) -> DecodedBody:
        """Return what a body asks of one of the endpoints; an error in it is returned with the endpoint."""
        network, embeds = self.service.config.network, self.service.config.input.enable_prompt_embeds
        return decode_body(body, self.candidates, network, self.candidates_of, embeds=embeds)


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


def _refuse_before_hop(service: Service, request: HttpRequest, body: Buffer) -> None:
    """Raise ``OverloadedError`` if a request would wait for too long until a thread decodes it and it is computed.

    Prompts are tokenised in the same threads.
    """
    wait_s, max_queue_s = service.offload.undecoded.wait_s(request.client.number), service.config.scheduling.max_queue_s
    waits_s = wait_s + request.timings.waited_s
    # 0.7 instead of 2.2 ms of CPU time for a body of 100 KB that names the full one of two models
    # (python -m benchmarks.refusal_costs --models 2, "before thread").
    served = service.served.values()
    if len(body) <= SEARCHED_BYTES and any(each.engine.queue.admission.is_refusing(waits_s) for each in served):
        _refuse(service, request, body, decoding_s=wait_s)
    if wait_s and waits_s > max_queue_s and not request.client.is_background:
        raise OverloadedError(
            f"The queue is full: this request would wait for about {waits_s:.1f} s to be decoded, longer than "
            f"{max_queue_s:g} s (--max-queue-s).",
            retry_after_s=retry_after_s(wait_s, max_queue_s),
        )
