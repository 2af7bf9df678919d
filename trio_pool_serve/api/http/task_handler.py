"""Handles a request for a task: decodes its body, and calls the endpoint under a deadline."""

import time
from collections.abc import Sequence
from functools import partial

import msgspec
import trio
from attrs import define, evolve

from trio_pool_serve.api.http.deadline import set_deadline
from trio_pool_serve.api.http.endpoint import Call, Dialect, DialectEndpoint
from trio_pool_serve.api.http.endpoint_choice import (
    CandidatesOf,
    DecodedBody,
    PathByFields,
    decode_body,
    endpoints_by_path,
    model_named_by,
)
from trio_pool_serve.api.http.json_body import decode_json, is_quick_to_decode
from trio_pool_serve.api.http.overload import refuse_before_body, refuse_before_thread
from trio_pool_serve.api.http.request import HttpRequest
from trio_pool_serve.api.http.request_body import Buffer
from trio_pool_serve.api.http.response import HttpResponse
from trio_pool_serve.api.http.route_table import Routes, name_in_path
from trio_pool_serve.errors import DeadlineExceededError
from trio_pool_serve.rendering.memory_budget import Reservation
from trio_pool_serve.service import Service
from trio_pool_serve.tasks.request_context import RequestContext


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
        refuse_before_body(service, request, reservation)
        decoded = await self._decoded(request)
        claimed_by, wire = request.claimed_by, request.wire = decoded.claimed_by, decoded.wire
        if decoded.error is not None:
            raise decoded.error
        name, suffix = model_named_by(
            decoded, service.models, among=request.models, in_path=name_in_path(request.route, request.path)
        )
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
            request.require_json_type()
        body = await request.body.take(self.service.config.time_limits.client_timeout_s)
        if is_quick_to_decode(body):
            return self.decode(body)
        refuse_before_thread(self.service, request, body)
        began = time.perf_counter()
        decoded = await self.service.offload.decode(request.client.number, partial(self.decode, body))
        request.timings.waited_s += time.perf_counter() - began
        return decoded

    def decode(self, body: Buffer) -> DecodedBody:
        """Return a decoded body with its endpoint and job; an error in the body is returned with the endpoint."""
        network, embeds = self.service.config.network, self.service.config.input.enable_prompt_embeds
        return decode_body(body, self.candidates, network, self.candidates_of, embeds=embeds)
