"""What goes between those who ask and an engine process: rows there, answers back.

Structs of msgspec and not attrs classes: they go over the wire as arrays, and a union of them can be told apart.
Each row and each answer is encoded by itself, with the bytes of its own arrays behind the header, in the order in which
it describes them: one that cannot be written or read fails alone.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, TypeAlias

import msgspec
import numpy as np
from attrs import define, field

from trio_pool_serve import errors
from trio_pool_serve.engine.remote.arrays import ArrayHeader, Payload, buffer_of, described
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
    """Tell whether an error is made of its message alone, as it is at the other end of the wire."""
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
"""How a row may fail. What else an engine might raise arrives as ``BatchFailedError``."""

ROWS_TOGETHER = 1024
BYTES_TOGETHER = 64 * 2**20
"""A frame with so many rows, or so many bytes of their arrays, is sent before more are added to it."""

MAX_PART_BYTES = MAX_HEADER_BYTES // ROWS_TOGETHER // 2
"""Of one row or answer, its arrays not counted: so many of them fit into a header."""


class OptionalArrays(msgspec.Struct, array_like=True):
    """What a prompt may have optional_arrays its tokens; each array is described if it is there."""

    type_ids: ArrayHeader | None = None
    kept: ArrayHeader | None = None
    embeds: ArrayHeader | None = None
    images: list[tuple[str, ArrayHeader]] | None = None
    image_tokens: tuple[int, ...] = ()


class Row(msgspec.Struct, array_like=True):
    """A ``PoolingRequest``. Its token ids are int32; ``params`` are the ``wire_name`` and the fields of each."""

    tokens: int
    params: list[tuple[str, Any]]
    priority: int = 0
    group: int = 0
    instruction_tokens: int = 0
    attended: int | None = None
    optional_arrays: OptionalArrays | None = None


class Part(msgspec.Struct, array_like=True):
    """A ``Row``, an ``Answer`` or a ``Failure``, encoded by itself, and how many bytes of the payload are its own.

    ``id`` is the asking side's number of the row, for this connection.
    """

    id: int
    nbytes: Annotated[int, msgspec.Meta(ge=0)]
    content: msgspec.Raw


class Submit(msgspec.Struct, tag=True, array_like=True):
    """Compute these rows."""

    rows: list[Part]


class Withdraw(msgspec.Struct, tag=True, array_like=True):
    """These rows are not waited for any more."""

    ids: list[int]


class CloseScope(msgspec.Struct, tag=True, array_like=True):
    """The request that held queries under this number has ended."""

    scope: int


class Hello(msgspec.Struct, tag=True, array_like=True):
    """The first that an engine process says: what it has loaded."""

    dimensions: int
    embeds_width: int


class Answer(msgspec.Struct, tag=True, array_like=True):
    """A ``PoolingOutput``: each value's shape, float32; of a sparse one −1 and its length, int32 then float32."""

    queue_s: float
    forward_s: float
    copy_s: float
    values: list[tuple[int, ...]]


class Failure(msgspec.Struct, tag=True, array_like=True):
    """A row that was not computed: one of ``FAILURES``, and what it says."""

    kind: str
    message: str


class Answers(msgspec.Struct, tag=True, array_like=True):
    """Rows that are done, and how busy the engine is: tokens of others' rows too, and how fast they drain."""

    rows: list[Part]
    waiting_tokens: int
    tokens_per_s: float


ToEngine: TypeAlias = Submit | Withdraw | CloseScope
FromEngine: TypeAlias = Hello | Answers


@define(eq=False)
class Frame:
    """Rows or answers that are sent together, and the arrays behind them."""

    parts: list[Part] = field(init=False, factory=list)
    buffers: list[Buffer] = field(init=False, factory=list)
    _nbytes: int = field(init=False, default=0)

    def add(self, number: int, content: Row | Answer | Failure, buffers: Sequence[Buffer] = ()) -> None:
        """Add a row or what became of one. Raises what msgspec raises, and ``ValueError`` for one that is too large."""
        encoded = msgspec.msgpack.encode(content, enc_hook=_query_numbers)
        nbytes = sum(map(len, buffers))
        if len(encoded) > MAX_PART_BYTES or nbytes > MAX_PAYLOAD_BYTES - BYTES_TOGETHER:
            raise ValueError(f"{len(encoded)} and {nbytes} bytes are too many")
        self.parts.append(Part(number, nbytes, msgspec.Raw(encoded)))
        self.buffers += buffers
        self._nbytes += nbytes

    @property
    def is_full(self) -> bool:
        """Whether it is to be sent before more is added."""
        return len(self.parts) >= ROWS_TOGETHER or self._nbytes >= BYTES_TOGETHER


def parts_of(parts: Sequence[Part], behind: memoryview) -> Iterator[tuple[Part, Payload]]:
    """Give each of a frame's parts with its own bytes; they are fewer than it says if there are no more."""
    begin = 0
    for part in parts:
        yield part, Payload(behind[begin : begin + part.nbytes])
        begin += part.nbytes


def _of(error: Exception) -> str:
    """Return an error's type and what it says."""
    return f"{type(error).__name__}: {error}"


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


def _query_numbers(value: object) -> list[int]:
    """Return what the other end knows a query by. Raises ``TypeError`` for anything else that msgpack does not have."""
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
            optional_arrays = _beside(prompt, buffers)
        row = Row(
            len(prompt.token_ids),
            [(param.wire_name, param) for param in request.params],
            request.priority,
            request.group,
            prompt.instruction_tokens,
            prompt.attended,
            optional_arrays,
        )
        frame.add(number, row, buffers)
    except Exception as error:  # whatever the params are
        raise UnsendableError(f"An input cannot be sent to the engine process: {_of(error)}") from error


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

    def held(self, kind: type[Any], numbers: Any) -> HeldQuery:
        """Return the query that a field of params is. Raises for a field of any other type that msgspec has not."""
        if kind is not HeldQuery:
            raise NotImplementedError(f"no field of params can be of type {kind}")
        scope, query = numbers
        return self.query(scope, query)

    def close(self, scope: int) -> None:
        """Free what is held under a number; nothing if nothing is."""
        if scope in self._scopes:
            self._scopes.pop(scope).close()
            self._queries = {known: query for known, query in self._queries.items() if known[0] != scope}

    def close_all(self) -> None:
        """Free everything."""
        for scope in list(self._scopes):
            self.close(scope)


def read_row(part: Part, payload: Payload, scopes: Scopes) -> PoolingRequest:
    """Return a row; its arrays share the payload's memory. Raises ``UnsendableError`` for one that cannot be read."""
    try:
        return _request(msgspec.msgpack.decode(part.content, type=Row), payload, scopes)
    except Exception as error:  # of what the params are made of, too
        raise UnsendableError(f"The engine process cannot read an input: {_of(error)}") from error


def _request(row: Row, payload: Payload, scopes: Scopes) -> PoolingRequest:
    ids = payload.take(("<i4", (row.tokens,)))
    params = tuple([_param(name, fields, scopes) for name, fields in row.params])
    if row.optional_arrays is None:
        prompt = RenderedPrompt(ids, row.instruction_tokens, attended=row.attended)
        return PoolingRequest(prompt, params, row.priority, row.group)
    optional_arrays, arrays = row.optional_arrays, {}
    for name in ("type_ids", "kept", "embeds"):
        array = getattr(optional_arrays, name)
        arrays[name] = None if array is None else payload.take(array)
    images = None
    if optional_arrays.images is not None:
        images = ImageFeatures(
            {name: payload.take(array) for name, array in optional_arrays.images}, optional_arrays.image_tokens
        )
    prompt = RenderedPrompt(ids, row.instruction_tokens, attended=row.attended, images=images, **arrays)
    return PoolingRequest(prompt, params, row.priority, row.group)


def _param(name: str, fields: Any, scopes: Scopes) -> PoolingParams:
    if name not in PoolingParams.by_name:
        raise LookupError(f"no module that is imported here defines the params {name}")
    return msgspec.convert(fields, PoolingParams.by_name[name], dec_hook=scopes.held)


# -- answers back --------------------------------------------------------------------------------------------


def add_answer(frame: Frame, number: int, outcome: PoolingOutput | Exception) -> None:
    """Add what became of a row to a frame: a failure also if that cannot be sent."""
    error = outcome
    if isinstance(outcome, PoolingOutput):
        buffers: list[Buffer] = []
        try:
            values = [_shape(value, buffers) for value in outcome.values]
            frame.add(number, Answer(outcome.queue_s, outcome.forward_s, outcome.copy_s, values), buffers)
        except Exception as raised:  # whatever a head has made
            error = UnsendableError(f"What the model made of an input cannot be sent: {_of(raised)}")
        else:
            return
    # As the nearest of its bases that the other end knows.
    kinds = (base.__name__ for base in type(error).__mro__ if FAILURES.get(base.__name__) is base)
    frame.add(number, Failure(next(kinds, BatchFailedError.__name__), sendable(str(error))))


def _shape(value: PooledValue, buffers: list[Buffer]) -> tuple[int, ...]:
    """Return the shape that ``Answer.values`` has for a value, whose arrays are added to ``buffers``."""
    if isinstance(value, SparseVector):
        buffers += [
            buffer_of(value.indices.astype(np.int32, copy=False)),
            buffer_of(value.values.astype(np.float32, copy=False)),
        ]
        return -1, len(value.indices)
    buffers.append(buffer_of(value.astype(np.float32, copy=False)))
    return value.shape


def read_answer(part: Part, payload: Payload) -> PoolingOutput | PoolServeError:
    """Return what became of a row; arrays share the payload's memory. What cannot be read is an ``UnsendableError``."""
    try:
        answer = msgspec.msgpack.decode(part.content, type=Answer | Failure)
        if isinstance(answer, Failure):
            return FAILURES.get(answer.kind, BatchFailedError)(answer.message)
        values = tuple([_value(shape, payload) for shape in answer.values])
    except Exception as error:
        return UnsendableError(f"What the engine process made of an input cannot be read: {_of(error)}")
    return PoolingOutput(values, answer.queue_s, answer.forward_s, answer.copy_s)


def _value(shape: tuple[int, ...], payload: Payload) -> PooledValue:
    if len(shape) == 2 and shape[0] == -1:
        return SparseVector(payload.take(("<i4", shape[1:])), payload.take(("<f4", shape[1:])))
    return payload.take(("<f4", shape))
