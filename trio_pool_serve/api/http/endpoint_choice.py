"""Which endpoint a body is for, where several dialects share a path, and the job that is made of it."""

import codecs
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeAlias

import msgspec
from attrs import define, evolve, fields_dict, frozen

from trio_pool_serve.api.http.endpoint import Dialect, DialectEndpoint, Endpoint
from trio_pool_serve.api.http.json_body import READ_AGAIN, cut_payloads, decode_json, find, refuse_many_values
from trio_pool_serve.api.http.request_body import Buffer
from trio_pool_serve.config import NetworkConfig
from trio_pool_serve.errors import MissingFieldError, PoolServeError, require_request
from trio_pool_serve.service import Service
from trio_pool_serve.serving.named_models import NamedModels

SEARCHED_FROM = 256 * 1024
"""Bytes; in larger bodies, names are searched for in pieces: that is faster than parsing twice."""

MAX_NAME = 64
MAX_NAMES = 5
"""Characters of an unknown field, and such fields, that an error repeats."""

WITHOUT_EFFECT = frozenset({"padding", "user"})
"""Fields that change no response: a dialect of the path accepts them even if only another one has them."""

CandidatesOf: TypeAlias = Callable[[Buffer | bytes], Sequence[DialectEndpoint]]
"""Returns the endpoints that a body may be for. Raises ``PoolServeError``."""


@frozen(eq=False, kw_only=True)
class PathByFields:
    """A path whose bodies are for other paths, chosen by their fields.

    ``path_of`` returns one of ``targets``, and raises ``PoolServeError`` for a body that is for none: the dialect of
    the first target writes the error. For large bodies, it is called in a thread.
    """

    path: str
    targets: tuple[str, ...]
    path_of: Callable[[Mapping[str, msgspec.Raw], Service], str]
    summary: str
    """A line for ``/openapi.json``."""


@define(eq=False)
class DecodedBody:
    """The endpoint that a body is for, the body decoded, and the job made of it; or the error in it."""

    claimed_by: DialectEndpoint
    wire: Any = None
    job: Any = None
    error: PoolServeError | None = None


def endpoints_by_path(dialects: Sequence[Dialect]) -> Mapping[str, Sequence[DialectEndpoint]]:
    """Return for each path the endpoints that share it, endpoints with discriminators first."""
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
        fields = [frozenset(fields_dict(candidate.endpoint.wire)) for candidate in candidates]
        every = frozenset[str]().union(*fields) - WITHOUT_EFFECT
        candidates[:] = [evolve(each, foreign=every - own) for each, own in zip(candidates, fields, strict=True)]
    return found


def decode_body(
    body: Buffer,
    candidates: Sequence[DialectEndpoint],
    network: NetworkConfig,
    candidates_of: CandidatesOf | None = None,
    *,
    embeds: bool = False,
) -> DecodedBody:
    """Find the endpoint that a body is for, and make its job; an error is returned, with the endpoint.

    A byte order mark is skipped. Token embeddings are looked for only if ``embeds``.
    """
    claimed_by = candidates[-1]
    rest: Buffer | bytes = body
    wire = None
    try:
        if body[: len(codecs.BOM_UTF8)] == codecs.BOM_UTF8:
            body = bytearray(body[len(codecs.BOM_UTF8) :])
        rest, cuts = cut_payloads(body, network.max_inputs_per_request if embeds else 0)
        refuse_many_values(rest, network.max_inputs_per_request)
        if candidates_of is not None:
            candidates = candidates_of(rest)
            claimed_by = candidates[-1]
        if len(candidates) > 1:
            fields = _fields(rest, candidates)
            claimed_by = _claimant(fields, candidates)
            _refuse_foreign(fields, claimed_by)
        endpoint = claimed_by.endpoint
        wire = decode_json(rest, endpoint.wire, strict=network.strict_requests, cuts=cuts)
        return DecodedBody(claimed_by, wire, endpoint.to_job(wire, network.max_inputs_per_request))
    except MissingFieldError as error:
        return DecodedBody(claimed_by, wire, error=error.beside(_unknown_fields(rest, claimed_by.endpoint)))
    except PoolServeError as error:
        return DecodedBody(claimed_by, wire, error=error)


def _unknown_fields(body: Buffer | bytes, endpoint: Endpoint[Any, Any]) -> list[str]:
    """Return some fields of a body that its endpoint does not have; none of a large body, which would take long."""
    sent = decode_json(body, dict[str, msgspec.Raw]) if len(body) <= READ_AGAIN else {}
    return [name[:MAX_NAME] for name in sent if name not in fields_dict(endpoint.wire)][:MAX_NAMES]


def model_named_by(
    decoded: DecodedBody, models: NamedModels, *, among: Collection[str] | None, in_path: str | None = None
) -> tuple[str | None, str]:
    """Return the model that a request names, in its path or its body, and the suffix of the name, if any.

    ``among`` are the names that it may use. Raises ``InvalidRequestError`` if path and body name different models.
    """
    name = getattr(decoded.wire, "model", None) or in_path
    require_request(
        in_path is None or name == in_path,
        f"The path names the model `{in_path}`, but the body names `{name}`: leave out `model`.",
        param="model",
    )
    return models.without_suffix(name, decoded.claimed_by.endpoint.model_suffixes, among=among)


def _fields(body: Buffer | bytes, candidates: Sequence[DialectEndpoint]) -> Mapping[str, msgspec.Raw]:
    """Return a body's fields; none if a large body contains neither a discriminator nor a foreign field."""
    if len(body) > SEARCHED_FROM:
        names = candidates[-1].foreign.union(*(candidate.endpoint.discriminators for candidate in candidates))
        if all(find(body, f'"{name}"'.encode()) < 0 for name in names):
            return {}
    return decode_json(body, dict[str, msgspec.Raw])


def _refuse_foreign(fields: Mapping[str, msgspec.Raw], claimed_by: DialectEndpoint) -> None:
    """Raise ``InvalidRequestError`` for a field that only other dialects of the path have, unless it is null."""
    for name in sorted(claimed_by.foreign.intersection(fields)):
        require_request(
            bytes(fields[name]) == b"null",
            f"Leave out `{name}`: {claimed_by.dialect.name} requests to this route have no such field.",
            param=name,
        )


def _claimant(fields: Collection[str], candidates: Sequence[DialectEndpoint]) -> DialectEndpoint:
    for candidate in candidates:
        discriminators = candidate.endpoint.discriminators
        if not discriminators or not discriminators.isdisjoint(fields):
            return candidate
    raise MissingFieldError(*sorted(set().union(*(candidate.endpoint.discriminators for candidate in candidates))))
