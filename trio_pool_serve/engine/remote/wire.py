"""The messages between API processes and an engine process: rows to the engine, answers back.

They are msgspec structs and not attrs classes because msgspec sends those as arrays and distinguishes those of a tagged
union. Each row and each answer is encoded separately, and its arrays are in the frame's payload in the order of its
headers: one that cannot be encoded or decoded fails alone. A frame of one row takes 0.42 times the CPU time of pickle
5 with its arrays out of band, one of 64 rows 1.17 times (``benchmarks/results/row_frames.md``), and runs no code.
"""

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, TypeAlias

import msgspec
import numpy as np
import trio
from attrs import define, field

from trio_pool_serve import errors
from trio_pool_serve.engine.compute_rates import WORK_CLASSES
from trio_pool_serve.engine.remote.arrays import Array, ArrayHeader, Payload, buffer_of, header_of
from trio_pool_serve.errors import BatchFailedError, PoolServeError, UnsendableError
from trio_pool_serve.processes.framed_stream import MAX_HEADER_BYTES, MAX_PAYLOAD_BYTES, Buffer, sendable
from trio_pool_serve.types import (
    HeldQuery,
    ImageFeatures,
    PooledValue,
    PoolingOutput,
    PoolingParams,
    PoolingRequest,
    QueryScope,
    RenderedPrompt,
    SparseVector,
)


def _takes_a_message(kind: type[PoolServeError]) -> bool:
    """Return whether an error can be created from its message alone, as the receiver does."""
    try:
        inspect.signature(kind.__init__).bind(None, "")
    except TypeError:
        return False
    return True


FAILURES: Mapping[str, type[PoolServeError]] = {
    name: kind
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, PoolServeError) and _takes_a_message(kind)
}
"""Error classes by the name that is sent. Any other error of an engine arrives as ``BatchFailedError``."""

FULL_FRAME_ROWS = 1024
FULL_FRAME_BYTES = 64 * 2**20
"""A frame with this many rows, or this many bytes of their arrays, is sent before more are added to it."""

MAX_PART_BYTES = MAX_HEADER_BYTES // FULL_FRAME_ROWS // 2
"""Of one row or answer without its arrays, so that a full frame's parts fit into a header."""


class OptionalArrays(msgspec.Struct, array_like=True):
    """Headers of the arrays that a prompt has besides its token ids."""

    type_ids: ArrayHeader | None = None
    kept: ArrayHeader | None = None
    embeds: ArrayHeader | None = None
    images: list[tuple[str, ArrayHeader]] | None = None
    image_tokens: tuple[int, ...] = ()


class Row(msgspec.Struct, array_like=True):
    """A ``PoolingRequest``: the number of its token ids (int32), and the ``wire_name`` and fields of its params."""

    tokens: int
    params: list[tuple[str, Any]]
    priority: int = 0
    group: int = 0
    client: int = 0
    rank: int = 0
    timeout_s: float | None = None
    """Until its deadline: clocks of processes differ."""
    instruction_tokens: int = 0
    attended: int | None = None
    optional_arrays: OptionalArrays | None = None


class Part(msgspec.Struct, array_like=True):
    """An encoded ``Row``, ``Answer`` or ``Failure``, and the number of the payload's bytes that belong to it.

    ``id`` is the number that the API process has given the row, unique for one connection.
    """

    id: int
    nbytes: Annotated[int, msgspec.Meta(ge=0)]
    content: msgspec.Raw


class Submit(msgspec.Struct, tag=True, array_like=True):
    """Compute these rows."""

    rows: list[Part]


class Withdraw(msgspec.Struct, tag=True, array_like=True):
    """Take these rows out of the queue."""

    ids: list[int]


class CloseScope(msgspec.Struct, tag=True, array_like=True):
    """Free the queries of one scope: its request has ended."""

    scope: int


class Hello(msgspec.Struct, tag=True, array_like=True):
    """The first message of an engine process: the sizes of the model that it has loaded, and of its batches.

    With the agreement of a quantised model with float32.
    """

    dimensions: int
    embeds_width: int
    max_batch_tokens: int
    cosine_with_float32: float | None = None
    probe: tuple[list[int], str] | None = None
    """Token ids, and the ``wire_name`` of params that have defaults, of a row that the model can compute."""


class Answer(msgspec.Struct, tag=True, array_like=True):
    """A ``PoolingOutput``: the shape of each value, which is float32.

    A ``SparseVector`` has the shape (−1, length); its indices, int32, come first.
    """

    queue_s: float
    forward_s: float
    copy_s: float
    values: list[tuple[int, ...]]


class Failure(msgspec.Struct, tag=True, array_like=True):
    """A row that failed: the name of one of ``FAILURES``, and its message."""

    kind: str
    message: str


class Answers(msgspec.Struct, tag=True, array_like=True):
    """Finished and failed rows, and the engine's load: queued tokens of all connections, and the measured rates.

    Without rows it is a heartbeat. ``seconds_per_token`` are float64, as in ``SecondsPerToken``; ``stall_reason`` is
    the engine's.
    """

    rows: list[Part]
    waiting_tokens: int
    tokens_per_s: float
    seconds_per_token: Annotated[bytes, msgspec.Meta(min_length=8 * WORK_CLASSES, max_length=8 * WORK_CLASSES)]
    stall_reason: str = ""


ToEngine: TypeAlias = Submit | Withdraw | CloseScope
FromEngine: TypeAlias = Hello | Answers


@define(eq=False)
class Frame:
    """Rows or answers that are sent together, with their arrays."""

    parts: list[Part] = field(init=False, factory=list)
    buffers: list[Buffer] = field(init=False, factory=list)
    _nbytes: int = field(init=False, default=0)

    def add(self, number: int, content: Row | Answer | Failure, buffers: Sequence[Buffer] = ()) -> None:
        """Add a row or its outcome. Raises what msgspec raises, and ``ValueError`` for one that is too large."""
        encoded = msgspec.msgpack.encode(content, enc_hook=_numbers_of)
        nbytes = sum(map(len, buffers))
        if len(encoded) > MAX_PART_BYTES or nbytes > MAX_PAYLOAD_BYTES - FULL_FRAME_BYTES:
            raise ValueError(f"{len(encoded)} and {nbytes} bytes are too many")
        self.parts.append(Part(number, nbytes, msgspec.Raw(encoded)))
        self.buffers += buffers
        self._nbytes += nbytes

    @property
    def is_full(self) -> bool:
        """Whether it is sent before more is added."""
        return len(self.parts) >= FULL_FRAME_ROWS or self._nbytes >= FULL_FRAME_BYTES


def parts_of(parts: Sequence[Part], payload: memoryview) -> Iterator[tuple[Part, Payload]]:
    """Yield each part of a frame with its bytes of the payload, which may be fewer than its ``nbytes``."""
    begin = 0
    for part in parts:
        yield part, Payload(payload[begin : begin + part.nbytes])
        begin += part.nbytes


@define(eq=False)
class RemoteScope:
    """The API process's end of a scope: the queries of one request that an engine process holds.

    ``close`` calls ``closed``.
    """

    number: int
    closed: Callable[["RemoteScope"], None]
    _queries: dict[HeldQuery, int] = field(init=False, factory=dict)

    def number_of(self, query: HeldQuery) -> int:
        """Return the number by which a query is sent."""
        return self._queries.setdefault(query, len(self._queries))

    def close(self) -> None:
        """Have the engine process free the queries."""
        self.closed(self)


def _numbers_of(value: object) -> list[int]:
    """Encode a query as two numbers, its scope's and its own. Raises ``TypeError`` for values of other types."""
    if isinstance(value, HeldQuery) and isinstance(value.scope, RemoteScope):
        return [value.scope.number, value.scope.number_of(value)]
    raise TypeError(f"a {type(value).__name__} has no form in msgpack")


def add_row(frame: Frame, number: int, request: PoolingRequest) -> None:
    """Add a row to a frame. Raises ``UnsendableError``."""
    prompt = request.prompt
    try:
        buffers = [buffer_of(prompt.token_ids)]
        optional_arrays = None
        if not (prompt.type_ids is None and prompt.kept is None and prompt.embeds is None and prompt.images is None):
            optional_arrays = _optional_arrays(prompt, buffers)
        row = Row(
            len(prompt.token_ids),
            [(param.wire_name, param) for param in request.params],
            request.priority,
            request.group,
            request.client,
            request.rank,
            None if request.deadline == math.inf else request.deadline - trio.current_time(),
            prompt.instruction_tokens,
            prompt.attended,
            optional_arrays,
        )
        frame.add(number, row, buffers)
    except Exception as error:  # fields of params may be of any type
        raise UnsendableError(f"An input cannot be sent to the engine process: {_reason(error)}") from error


def _message(error: object) -> str:
    try:
        return str(error)
    except Exception:  # a plugin's class
        return "its message cannot be read"


def _reason(error: object) -> str:
    return f"{type(error).__name__}: {_message(error)}"


def _optional_arrays(prompt: RenderedPrompt, buffers: list[Buffer]) -> OptionalArrays:
    optional_arrays = OptionalArrays()
    for name in ("type_ids", "kept", "embeds"):
        array = getattr(prompt, name)
        if array is not None:
            setattr(optional_arrays, name, header_of(array))
            buffers.append(buffer_of(array))
    if prompt.images is not None:
        optional_arrays.images = [(name, header_of(array)) for name, array in prompt.images.arrays.items()]
        optional_arrays.image_tokens = prompt.images.tokens
        buffers += [buffer_of(array) for array in prompt.images.arrays.values()]
    return optional_arrays


@define(eq=False)
class Scopes:
    """The engine's scopes for the ``RemoteScope`` numbers of one connection, each opened when it is first used."""

    open_scope: Callable[[], QueryScope]
    _scopes: dict[int, QueryScope] = field(init=False, factory=dict)
    _queries: dict[tuple[int, int], HeldQuery] = field(init=False, factory=dict)

    def query(self, kind: type[Any], numbers: Any) -> HeldQuery:
        """Decode the numbers of a query. Raises ``NotImplementedError`` for a field of another type."""
        if kind is not HeldQuery:
            raise NotImplementedError(f"no field of params can be of type {kind}")
        scope, query = numbers
        if (scope, query) not in self._queries:
            if scope not in self._scopes:
                self._scopes[scope] = self.open_scope()
            self._queries[scope, query] = HeldQuery(self._scopes[scope])
        return self._queries[scope, query]

    def close(self, scope: int) -> None:
        """Close the scope of a number, if it is open."""
        if scope in self._scopes:
            self._scopes.pop(scope).close()
            self._queries = {known: query for known, query in self._queries.items() if known[0] != scope}

    def close_all(self) -> None:
        """Close all scopes."""
        for scope in list(self._scopes):
            self.close(scope)


def read_row(part: Part, payload: Payload, scopes: Scopes) -> PoolingRequest:
    """Decode a row; its arrays share the payload's memory. Raises ``UnsendableError``."""
    try:
        return _request(msgspec.msgpack.decode(part.content, type=Row), payload, scopes)
    except Exception as error:  # constructors of params may raise anything
        raise UnsendableError(f"The engine process cannot read an input: {_reason(error)}") from error


def _request(row: Row, payload: Payload, scopes: Scopes) -> PoolingRequest:
    ids = payload.take(("<i4", (row.tokens,)))
    return PoolingRequest(
        _prompt(row, ids, payload),
        tuple([_param(name, fields, scopes) for name, fields in row.params]),
        row.priority,
        row.group,
        row.client,
        row.rank,
        math.inf if row.timeout_s is None else trio.current_time() + row.timeout_s,
    )


def _prompt(row: Row, ids: Array, payload: Payload) -> RenderedPrompt:
    if row.optional_arrays is None:
        return RenderedPrompt(ids, row.instruction_tokens, attended=row.attended)
    optional_arrays, arrays = row.optional_arrays, {}
    for name in ("type_ids", "kept", "embeds"):
        array = getattr(optional_arrays, name)
        arrays[name] = None if array is None else payload.take(array)
    images = None
    if optional_arrays.images is not None:
        images = ImageFeatures(
            {name: payload.take(array) for name, array in optional_arrays.images}, optional_arrays.image_tokens
        )
    return RenderedPrompt(ids, row.instruction_tokens, attended=row.attended, images=images, **arrays)


def _param(name: str, fields: Any, scopes: Scopes) -> PoolingParams:
    if name not in PoolingParams.by_name:
        raise LookupError(f"no module that is imported here defines the params {name}")
    return msgspec.convert(fields, PoolingParams.by_name[name], dec_hook=scopes.query)


def add_answer(frame: Frame, number: int, outcome: PoolingOutput | Exception) -> None:
    """Add the outcome of a row to a frame; an output that cannot be sent is added as a failure."""
    error = outcome
    if isinstance(outcome, PoolingOutput):
        buffers: list[Buffer] = []
        try:
            values = [_shape(value, buffers) for value in outcome.values]
            frame.add(number, Answer(outcome.queue_s, outcome.forward_s, outcome.copy_s, values), buffers)
        except Exception as raised:  # heads may return anything
            error = UnsendableError(f"The model's output cannot be sent: {_reason(raised)}")
        else:
            return
    # As the nearest of its bases that the receiver knows.
    kinds = (base.__name__ for base in type(error).__mro__ if FAILURES.get(base.__name__) is base)
    frame.add(number, Failure(next(kinds, BatchFailedError.__name__), sendable(_message(error))))


def _shape(value: PooledValue, buffers: list[Buffer]) -> tuple[int, ...]:
    """Return the shape of a value in ``Answer.values``, and add its arrays to ``buffers``."""
    if isinstance(value, SparseVector):
        buffers += [
            buffer_of(value.indices.astype(np.int32, copy=False)),
            buffer_of(value.values.astype(np.float32, copy=False)),
        ]
        return -1, len(value.indices)
    buffers.append(buffer_of(value.astype(np.float32, copy=False)))
    return value.shape


def read_answer(part: Part, payload: Payload) -> PoolingOutput | PoolServeError:
    """Decode the outcome of a row, an ``UnsendableError`` if it cannot be; arrays share the payload's memory."""
    try:
        answer = msgspec.msgpack.decode(part.content, type=Answer | Failure)
        if isinstance(answer, Failure):
            return FAILURES.get(answer.kind, BatchFailedError)(answer.message)
        values = tuple([_value(shape, payload) for shape in answer.values])
    except Exception as error:
        return UnsendableError(f"The engine process's output cannot be read: {_reason(error)}")
    return PoolingOutput(values, answer.queue_s, answer.forward_s, answer.copy_s)


def _value(shape: tuple[int, ...], payload: Payload) -> PooledValue:
    if len(shape) == 2 and shape[0] == -1:
        return SparseVector(payload.take(("<i4", shape[1:])), payload.take(("<f4", shape[1:])))
    return payload.take(("<f4", shape))
