"""What goes between those who ask and an engine process: rows there, answers back.

Structs of msgspec and not attrs classes: they go over the wire as arrays, and a union of them can be told apart.
Arrays travel behind the header, in the order in which the header describes them.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, TypeAlias

import attrs
import msgspec
import numpy as np
import numpy.typing as npt
from attrs import define, field

from trio_pool_serve import types
from trio_pool_serve.errors import BatchFailedError, EngineDeadError, EngineLoadingError, PoolServeError, QueryGoneError
from trio_pool_serve.processes.framed_stream import Buffer
from trio_pool_serve.types import (
    HeldQuery,
    HoldQuery,
    ImageFeatures,
    MaxSim,
    PooledValue,
    PoolingParams,
    PoolingRequest,
    QueryScope,
    RenderedPrompt,
    SparseVector,
)

Array: TypeAlias = npt.NDArray[Any]

ArrayHeader: TypeAlias = tuple[str, tuple[int, ...]]
"""An array's dtype, as ``dtype.str`` writes it, and its shape."""

Param: TypeAlias = tuple[str, list[Any]]
"""The name of one of the ``PoolingParams``, and its fields; of a held query, the numbers of its scope and of itself."""

PARAMS: Mapping[str, type[Any]] = {
    name: getattr(types, name)
    for name in ("Embed", "TokenEmbed", "SparseEmbed", "SparseLookup", "Classify", "TokenClassify")
}

HOLDERS: Mapping[str, type[Any]] = {"HoldQuery": HoldQuery, "MaxSim": MaxSim}

FAILURES: Mapping[str, type[PoolServeError]] = {
    failure.__name__: failure for failure in (BatchFailedError, EngineDeadError, EngineLoadingError, QueryGoneError)
}
"""How a row may fail. What else an engine might raise arrives as ``BatchFailedError``."""


class OptionalArrays(msgspec.Struct, array_like=True):
    """What a prompt may have optional_arrays its tokens; each array is described if it is there."""

    type_ids: ArrayHeader | None = None
    kept: ArrayHeader | None = None
    embeds: ArrayHeader | None = None
    images: list[tuple[str, ArrayHeader]] | None = None
    image_tokens: tuple[int, ...] = ()


class Row(msgspec.Struct, array_like=True):
    """A ``PoolingRequest``; ``id`` is the asking side's, for this connection. Its token ids are int32."""

    id: int
    tokens: int
    params: list[Param]
    priority: int = 0
    group: int = 0
    instruction_tokens: int = 0
    attended: int | None = None
    optional_arrays: OptionalArrays | None = None


class Submit(msgspec.Struct, tag=True, array_like=True):
    """Compute these rows."""

    rows: list[Row]


class Withdraw(msgspec.Struct, tag=True, array_like=True):
    """Nobody waits for these rows any more."""

    ids: list[int]


class CloseScope(msgspec.Struct, tag=True, array_like=True):
    """The request that held queries under this number has ended."""

    scope: int


class Hello(msgspec.Struct, tag=True, array_like=True):
    """The first that an engine process says: what it has loaded."""

    dimensions: int
    embeds_width: int


class Answer(msgspec.Struct, array_like=True):
    """A ``PoolingOutput``: each value's shape, float32; of a sparse one −1 and its length, int32 then float32."""

    id: int
    queue_s: float
    forward_s: float
    copy_s: float
    values: list[tuple[int, ...]]


class Failure(msgspec.Struct, array_like=True):
    """A row that was not computed: one of ``FAILURES``, and what it says."""

    id: int
    kind: str
    message: str


class Answers(msgspec.Struct, tag=True, array_like=True):
    """Rows that are done, and how busy the engine is: tokens of others' rows too, and how fast they drain."""

    rows: list[Answer]
    failures: list[Failure]
    waiting_tokens: int
    tokens_per_s: float


ToEngine: TypeAlias = Submit | Withdraw | CloseScope
FromEngine: TypeAlias = Hello | Answers


@define(eq=False)
class Payload:
    """The arrays behind a message, in the order in which they are taken."""

    view: memoryview
    _taken: int = field(default=0, init=False)

    def take(self, described: ArrayHeader) -> Array:
        """Return the next array, which shares the payload's memory."""
        kind, shape = described
        dtype = np.dtype(kind)
        if dtype.hasobject:
            raise ValueError(f"an array of {kind} cannot be sent")
        count = int(np.prod(shape))
        array = np.frombuffer(self.view, dtype, count, self._taken).reshape(shape)
        self._taken += array.nbytes
        return array


def described(array: Array) -> ArrayHeader:
    """Return what ``Payload.take`` asks for."""
    return array.dtype.str, array.shape


def buffer_of(array: Array) -> Buffer:
    """Return an array's bytes, copied only if they do not lie together."""
    return memoryview(np.ascontiguousarray(array).reshape(-1).view(np.uint8)) if array.size else b""  # type: ignore[arg-type]


# -- rows to the engine ------------------------------------------------------------------------------------


@define(eq=False)
class RemoteScope:
    """Queries that are held on an engine's device for one request, as whoever asks for them sees it."""

    number: int
    closed: Callable[["RemoteScope"], None]
    """Called by ``close``."""
    _queries: dict[HeldQuery, int] = field(init=False, factory=dict)

    def number_of(self, query: HeldQuery) -> int:
        """Return what a query is called over the wire."""
        return self._queries.setdefault(query, len(self._queries))

    def close(self) -> None:
        """Have the queries let go of."""
        self.closed(self)


@lru_cache(maxsize=256)
def _params(params: tuple[PoolingParams, ...]) -> list[Param]:
    return [(type(param).__name__, list(attrs.astuple(param))) for param in params]


def _held(param: HoldQuery | MaxSim) -> Param:
    scope = param.query.scope
    assert isinstance(scope, RemoteScope)  # noqa: S101  (a request's scope is opened where its rows are sent)
    return type(param).__name__, [scope.number, scope.number_of(param.query)]


def params_row(params: tuple[PoolingParams, ...]) -> list[Param]:
    """Return params as they go over the wire."""
    if any(isinstance(param, HoldQuery | MaxSim) for param in params):
        return [_held(param) if isinstance(param, HoldQuery | MaxSim) else _params((param,))[0] for param in params]
    return _params(params)


def write_rows(requests: Iterable[tuple[int, PoolingRequest]]) -> tuple[Submit, list[Buffer]]:
    """Return the message for rows, each with its number, and the arrays behind it."""
    rows, buffers = [], []
    for number, request in requests:
        prompt = request.prompt
        buffers.append(buffer_of(prompt.token_ids))
        optional_arrays = None
        if not (prompt.type_ids is None and prompt.kept is None and prompt.embeds is None and prompt.images is None):
            optional_arrays = _beside(prompt, buffers)
        rows.append(
            Row(
                number,
                len(prompt.token_ids),
                params_row(request.params),
                request.priority,
                request.group,
                prompt.instruction_tokens,
                prompt.attended,
                optional_arrays,
            )
        )
    return Submit(rows), buffers


def _beside(prompt: RenderedPrompt, buffers: list[Buffer]) -> OptionalArrays:
    optional_arrays = OptionalArrays()
    for name in ("type_ids", "kept", "embeds"):
        array = getattr(prompt, name)
        if array is not None:
            setattr(optional_arrays, name, described(array))
            buffers.append(buffer_of(array))
    if prompt.images is not None:
        optional_arrays.images = [(name, described(array)) for name, array in prompt.images.arrays.items()]
        optional_arrays.image_tokens = prompt.images.tokens
        buffers += [buffer_of(array) for array in prompt.images.arrays.values()]
    return optional_arrays


@define(eq=False)
class Scopes:
    """The engine's end of ``RemoteScope``: the real scopes of one connection, opened when they are first named."""

    open_scope: Callable[[], QueryScope]
    _scopes: dict[int, QueryScope] = field(init=False, factory=dict)
    _queries: dict[tuple[int, int], HeldQuery] = field(init=False, factory=dict)

    def query(self, scope: int, query: int) -> HeldQuery:
        """Return the query of two numbers."""
        if (scope, query) not in self._queries:
            if scope not in self._scopes:
                self._scopes[scope] = self.open_scope()
            self._queries[scope, query] = HeldQuery(self._scopes[scope])
        return self._queries[scope, query]

    def close(self, scope: int) -> None:
        """Free what is held under a number; nothing if nothing is."""
        if scope in self._scopes:
            self._scopes.pop(scope).close()
            self._queries = {known: query for known, query in self._queries.items() if known[0] != scope}

    def close_all(self) -> None:
        """Free everything."""
        for scope in list(self._scopes):
            self.close(scope)


def read_rows(message: Submit, payload: Payload, scopes: Scopes) -> list[tuple[int, PoolingRequest]]:
    """Return the rows of a message, each with its number; their arrays share the payload's memory."""
    return [(row.id, _request(row, payload, scopes)) for row in message.rows]


def _request(row: Row, payload: Payload, scopes: Scopes) -> PoolingRequest:
    ids = payload.take(("<i4", (row.tokens,)))
    params = tuple(_param(name, fields, scopes) for name, fields in row.params)
    if row.optional_arrays is None:
        prompt = RenderedPrompt(ids, row.instruction_tokens, attended=row.attended)
        return PoolingRequest(prompt, params, row.priority, row.group)
    optional_arrays, arrays = row.optional_arrays, {}
    for name in ("type_ids", "kept", "embeds"):
        array = getattr(optional_arrays, name)
        arrays[name] = None if array is None else payload.take(array)
    images = None
    if optional_arrays.images is not None:
        images = ImageFeatures({name: payload.take(array) for name, array in optional_arrays.images}, optional_arrays.image_tokens)
    prompt = RenderedPrompt(ids, row.instruction_tokens, attended=row.attended, images=images, **arrays)
    return PoolingRequest(prompt, params, row.priority, row.group)


def _param(name: str, fields: Sequence[Any], scopes: Scopes) -> PoolingParams:
    if name in HOLDERS:
        holder: PoolingParams = HOLDERS[name](scopes.query(*fields))
        return holder
    param: PoolingParams = PARAMS[name](*fields)
    return param


# -- answers back --------------------------------------------------------------------------------------------


def write_value(value: PooledValue, buffers: list[Buffer]) -> tuple[int, ...]:
    """Return the shape that ``Answer.values`` has for a value, whose arrays are added to ``buffers``."""
    if isinstance(value, SparseVector):
        buffers += [buffer_of(value.indices), buffer_of(value.values)]
        return -1, len(value.indices)
    buffers.append(buffer_of(value))
    return value.shape


def read_value(shape: tuple[int, ...], payload: Payload) -> PooledValue:
    """Return a value, whose arrays share the payload's memory."""
    if shape and shape[0] < 0:
        return SparseVector(payload.take(("<i4", shape[1:])), payload.take(("<f4", shape[1:])))
    return payload.take(("<f4", shape))


def failure_of(number: int, error: Exception | None) -> Failure:
    """Return how an error goes over the wire."""
    kind = type(error).__name__
    return Failure(number, kind if kind in FAILURES else BatchFailedError.__name__, str(error))


def error_of(failure: Failure) -> PoolServeError:
    """Return the error that a row failed by."""
    return FAILURES.get(failure.kind, BatchFailedError)(failure.message)
