"""From a path and the fields of a body to the endpoint that responds."""

import math
from collections.abc import Collection, Sequence
from typing import Any

import msgspec
import trio
from attrs import frozen

from trio_pool_serve.api.http.endpoint import Call, Dialect, DialectEndpoint
from trio_pool_serve.api.http.json_body import decode_json, read_body
from trio_pool_serve.api.http.json_limits import json_limits_of
from trio_pool_serve.api.http.payloads import cut_payloads, find
from trio_pool_serve.api.http.request import Handler, HttpRequest
from trio_pool_serve.api.http.request_body import Buffer
from trio_pool_serve.api.http.response import HttpResponse
from trio_pool_serve.api.http.route_table import Routes
from trio_pool_serve.config import NetworkConfig
from trio_pool_serve.errors import DeadlineExceededError, InvalidRequestError, PoolServeError
from trio_pool_serve.service import Service

SEARCHED_FROM = 256 * 1024
"""Bytes of a body from which looking for names in it, in pieces, is better than parsing it twice."""


@frozen(eq=False)
class DecodedBody:
    """The endpoint that a body is for, the body decoded, and the job made of it; or the error in it."""

    claimed_by: DialectEndpoint
    wire: Any = None
    job: Any = None
    error: PoolServeError | None = None


def endpoints_by_path(dialects: Sequence[Dialect]) -> dict[str, list[DialectEndpoint]]:
    """Return for each path the endpoints that share it, those with discriminators first."""
    found: dict[str, list[DialectEndpoint]] = {}
    for dialect in dialects:
        for endpoint in dialect.endpoints:
            for path in endpoint.paths:
                found.setdefault(path, []).append(DialectEndpoint(dialect, endpoint))
    for path, candidates in found.items():
        candidates.sort(key=lambda candidate: not candidate.endpoint.discriminators)
        claims_all = [candidate.dialect.name for candidate in candidates if not candidate.endpoint.discriminators]
        if len(claims_all) > 1:
            raise ValueError(f"{path} is claimed by {' and '.join(claims_all)} without discriminators.")
    return found


def task_routes(service: Service, dialects: Sequence[Dialect]) -> Routes:
    """Return the routes of all dialects."""
    return {
        ("POST", path): _task_handler(service, candidates) for path, candidates in endpoints_by_path(dialects).items()
    }


def _task_handler(service: Service, candidates: Sequence[DialectEndpoint]) -> Handler:
    """Return the handler of a path that those endpoints share.

    It runs under a deadline, the server's or the client's ``X-Request-Timeout`` (seconds) if that is sooner; past it
    ``DeadlineExceededError`` is raised.
    """
    config = service.config

    def decode(body: Buffer) -> DecodedBody:
        return decode_body(body, candidates, config.network, embeds=config.input.enable_prompt_embeds)

    async def respond(request: HttpRequest) -> HttpResponse:
        timeout_s = config.time_limits.body_timeout_s
        decoded = await read_body(request, decode, service.offload, timeout_s=timeout_s)
        claimed_by = request.claimed_by = decoded.claimed_by
        wire = request.wire = decoded.wire
        if decoded.error is not None:
            raise decoded.error
        call = Call(
            wire=wire,
            job=decoded.job,
            model=service.model(getattr(wire, "model", None)),
            service=service,
            timings=request.timings,
            request_id=request.request_id,
            claimed_by=claimed_by,
            deadline=request.deadline,
        )
        return await claimed_by.endpoint.respond(call)

    async def respond_in_time(request: HttpRequest) -> HttpResponse:
        request.is_task = True
        service.require_open()
        timeout_s = min(_client_timeout_s(request), config.time_limits.request_timeout_s)
        request.deadline = trio.current_time() + timeout_s
        try:
            with trio.fail_at(request.deadline):
                response = await respond(request)
        except trio.TooSlowError:
            raise DeadlineExceededError(f"The deadline of {timeout_s:g} s has passed.") from None
        service.metrics.total.observe(request.timings.total_s)
        return response

    return respond_in_time


def _client_timeout_s(request: HttpRequest) -> float:
    header = request.header(b"x-request-timeout")
    if header is None:
        return math.inf
    try:
        seconds = float(header)
    except ValueError:
        seconds = math.nan
    if not seconds > 0:
        raise InvalidRequestError(f"X-Request-Timeout must be a number of seconds above 0, not {header!r}.")
    return seconds


def decode_body(
    body: Buffer, candidates: Sequence[DialectEndpoint], network: NetworkConfig, *, embeds: bool = False
) -> DecodedBody:
    """Find the endpoint that a body is for, and make its job; an error is returned, with the endpoint.

    Token embeddings are looked for only if ``embeds``.
    """
    claimed_by = candidates[-1]
    wire = None
    try:
        rest, cuts = cut_payloads(body, network.max_inputs_per_request if embeds else 0)
        json_limits_of(network).refuse(rest)
        if len(candidates) > 1:
            claimed_by = _claimant(_fields(rest, candidates), candidates)
        endpoint = claimed_by.endpoint
        wire = decode_json(rest, endpoint.wire, strict=network.strict_requests, cuts=cuts)
        return DecodedBody(claimed_by, wire, endpoint.to_job(wire, network))
    except PoolServeError as error:
        return DecodedBody(claimed_by, wire, error=error)


def _fields(body: Buffer | bytes, candidates: Sequence[DialectEndpoint]) -> Collection[str]:
    """Return the names of a body's fields; of a large one that has no discriminator, none."""
    names = frozenset[str]().union(*(candidate.endpoint.discriminators for candidate in candidates))
    if len(body) > SEARCHED_FROM and all(find(body, f'"{name}"'.encode()) < 0 for name in names):
        return ()
    return decode_json(body, dict[str, msgspec.Raw])


def _claimant(fields: Collection[str], candidates: Sequence[DialectEndpoint]) -> DialectEndpoint:
    for candidate in candidates:
        discriminators = candidate.endpoint.discriminators
        if not discriminators or not discriminators.isdisjoint(fields):
            return candidate
    needed = " or ".join(sorted(set().union(*(candidate.endpoint.discriminators for candidate in candidates))))
    raise InvalidRequestError(f"The body needs one of these fields: {needed}.")
