"""From a path and a body's fields to the endpoint that answers."""

from collections.abc import Collection, Sequence
from typing import Any

import msgspec
from attrs import frozen

from trio_pool_serve.api.http.answer import Answer
from trio_pool_serve.api.http.bodies import decode_json, read_body
from trio_pool_serve.api.http.endpoint import Call, Dialect, Endpoint
from trio_pool_serve.api.http.exchange import Exchange, Handler
from trio_pool_serve.api.http.json_limits import json_limits_of
from trio_pool_serve.api.http.payloads import cut_payloads, find
from trio_pool_serve.api.http.received_body import Buffer
from trio_pool_serve.api.http.requests import measured
from trio_pool_serve.config import NetworkConfig
from trio_pool_serve.errors import InvalidRequestError, PoolServeError
from trio_pool_serve.service import Service

SEARCHED_FROM = 256 * 1024
"""Bytes of a body from which looking for names in it, in pieces, is better than parsing it twice."""


@frozen(eq=False)
class Candidate:
    """An endpoint, and whose it is."""

    dialect: Dialect
    endpoint: Endpoint[Any, Any]


@frozen(eq=False)
class ReadRequest:
    """A body that has been read: which endpoint it is for, and what it asks; or what is wrong with it."""

    candidate: Candidate
    wire: Any = None
    job: Any = None
    error: PoolServeError | None = None


def candidates_by_path(dialects: Sequence[Dialect]) -> dict[str, list[Candidate]]:
    """Return for each path the endpoints that share it, those with marks first."""
    found: dict[str, list[Candidate]] = {}
    for dialect in dialects:
        for endpoint in dialect.endpoints:
            for path in endpoint.paths:
                found.setdefault(path, []).append(Candidate(dialect, endpoint))
    for path, candidates in found.items():
        candidates.sort(key=lambda candidate: not candidate.endpoint.marks)
        unmarked = [candidate.dialect.name for candidate in candidates if not candidate.endpoint.marks]
        if len(unmarked) > 1:
            raise ValueError(f"{path} is claimed by {' and '.join(unmarked)} without marks.")
    return found


def dialect_handlers(service: Service, dialects: Sequence[Dialect]) -> dict[str, Handler]:
    """Return what answers the requests of all dialects, by path."""
    return {
        path: measured(service, _handler(service, candidates))
        for path, candidates in candidates_by_path(dialects).items()
    }


def _handler(service: Service, candidates: Sequence[Candidate]) -> Handler:
    config = service.config

    def parse(body: Buffer) -> ReadRequest:
        return read_request(body, candidates, config.network, embeds=config.input.enable_prompt_embeds)

    async def handle(exchange: Exchange) -> Answer:
        timeout_s = config.time_limits.body_timeout_s
        asked = await read_body(exchange.body, exchange.mimetype, parse, service.offload, timeout_s=timeout_s)
        dialect = exchange.dialect = asked.candidate.dialect
        if asked.error is not None:
            raise asked.error
        call = Call(
            wire=asked.wire,
            job=asked.job,
            model=service.model(getattr(asked.wire, "model", None)),
            service=service,
            timings=exchange.timings,
            request_id=exchange.request_id,
            dialect=dialect,
            deadline=exchange.deadline,
        )
        return await asked.candidate.endpoint.answer(call)

    return handle


def read_request(
    body: Buffer, candidates: Sequence[Candidate], network: NetworkConfig, *, embeds: bool = False
) -> ReadRequest:
    """Find the endpoint and make its job of a body; an error is returned, with whose it is.

    Where ``embeds`` are not taken, they are not looked for either.
    """
    candidate = candidates[-1]
    try:
        rest, cuts = cut_payloads(body, network.max_inputs_per_request if embeds else 0)
        json_limits_of(network).refuse(rest)
        if len(candidates) > 1:
            candidate = _claimant(_fields(rest, candidates), candidates)
        wire = decode_json(rest, candidate.endpoint.wire, strict=network.strict_requests, cuts=cuts)
        return ReadRequest(candidate, wire, candidate.endpoint.read(wire, network))
    except PoolServeError as error:
        return ReadRequest(candidate, error=error)


def _fields(body: Buffer | bytes, candidates: Sequence[Candidate]) -> Collection[str]:
    """Return the names of a body's fields; of a large one, none if those that tell endpoints apart are not in it."""
    marks = frozenset[str]().union(*(candidate.endpoint.marks for candidate in candidates))
    if len(body) > SEARCHED_FROM and all(find(body, f'"{mark}"'.encode()) < 0 for mark in marks):
        return ()
    return decode_json(body, dict[str, msgspec.Raw])


def _claimant(fields: Collection[str], candidates: Sequence[Candidate]) -> Candidate:
    for candidate in candidates:
        if not candidate.endpoint.marks or not candidate.endpoint.marks.isdisjoint(fields):
            return candidate
    needed = " or ".join(sorted(set().union(*(candidate.endpoint.marks for candidate in candidates))))
    raise InvalidRequestError(f"The body needs one of these fields: {needed}.")
