"""The messages between API processes and an engine process: rows to the engine, answers back.

They are msgspec structs and not attrs classes because msgspec sends those as arrays and distinguishes those of a tagged
union. Rows and answers that have everything in common but their numbers travel as one part of a frame: what they share
is encoded once, and each kind of array is one array, the rows' concatenated. Each part is encoded separately, and its
arrays are in the frame's payload in the order of the parts: one that cannot be encoded or decoded fails alone.
"""

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, TypeAlias

import msgspec
from attrs import define, field

from trio_pool_serve.engine.compute_rates import WORK_CLASSES
from trio_pool_serve.engine.remote.arrays import ArrayHeader, Payload
from trio_pool_serve.engine.remote.scopes import numbers_of
from trio_pool_serve.processes.framed_stream import MAX_HEADER_BYTES, MAX_PAYLOAD_BYTES, MAX_TEXT, Buffer
from trio_pool_serve.types import PlannedBatch

FULL_FRAME_ROWS = 1024
FULL_FRAME_BYTES = 2**20
"""A frame with this many rows, or this many bytes of their arrays, is sent before more are added to it: the receiver
can begin, and no more is copied at once."""

MAX_PART_BYTES = MAX_HEADER_BYTES // FULL_FRAME_ROWS // 2
"""Of a part without its arrays and what is of each row alone, so that a full frame's parts fit into a header."""

BYTES_OF_ROW = 256
"""Most bytes of a part that are of one row alone: numbers of up to nine bytes."""

Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]

MAX_WAITING_TOKENS = 2**40

MAX_PROBE_TOKENS = 4096

MAX_MODEL_BYTES = 2**50

Size: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
Bytes: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=MAX_MODEL_BYTES)]
Seconds: TypeAlias = Annotated[float, msgspec.Meta(ge=0, le=1e9)]
Name: TypeAlias = Annotated[str, msgspec.Meta(max_length=MAX_TEXT)]


RowNumbers: TypeAlias = Annotated[list[int], msgspec.Meta(max_length=FULL_FRAME_ROWS)]


class OptionalArrays(msgspec.Struct, array_like=True):
    """Headers of the arrays that one prompt has besides those with an element for each token."""

    embeds: ArrayHeader | None = None
    images: list[tuple[str, ArrayHeader]] | None = None
    image_tokens: tuple[int, ...] = ()
    chunks: ArrayHeader | None = None


class Rows(msgspec.Struct, array_like=True):
    """``PoolingRequest``s with equal params and the same kinds of arrays.

    The payload has the token ids of all (int32), then the arrays that are named in ``token_arrays``, with as many
    elements. A row that has ``optional_arrays`` is alone. Lists that are not of ``lengths`` have one item for each row,
    or one that is the same for all.
    """

    lengths: list[Count]
    """Tokens of each row."""
    params: list[tuple[str, Any]]
    """The ``wire_name`` and fields of each."""
    priority: list[int]
    group: list[int]
    client: list[int]
    rank: list[int]
    timeout_s: list[float | None]
    """Until the deadline: clocks of processes differ."""
    instruction_tokens: list[int]
    attended: list[int | None]
    token_arrays: tuple[str, ...] = ()
    """Of ``type_ids`` (int32) and ``kept`` (bool)."""
    optional_arrays: OptionalArrays | None = None
    planned: list[PlannedBatch | None] = msgspec.field(default_factory=lambda: [None])


class Part(msgspec.Struct, array_like=True):
    """Encoded ``Rows``, ``Outputs`` or ``Failure``, and the number of the payload's bytes that belong to them.

    ``ids`` are the numbers that the API process has given the rows, unique for one connection.
    """

    ids: RowNumbers
    nbytes: Count
    content: msgspec.Raw

    def require_usual_size(self) -> None:
        """Raise ``ValueError`` if the content is larger than any that is sent: to decode it may take seconds."""
        nbytes = memoryview(self.content).nbytes
        if nbytes > _most_bytes(len(self.ids)):
            raise ValueError(f"{nbytes} bytes for {len(self.ids)} rows are too many")


Parts: TypeAlias = Annotated[list[Part], msgspec.Meta(max_length=FULL_FRAME_ROWS)]


class Submit(msgspec.Struct, tag=True, array_like=True):
    """Compute these rows."""

    parts: Parts


class Withdraw(msgspec.Struct, tag=True, array_like=True):
    """Take these rows out of the queue."""

    ids: RowNumbers


class CloseScope(msgspec.Struct, tag=True, array_like=True):
    """Free the queries of one scope: its request has ended."""

    scope: int


class Heartbeat(msgspec.Struct, tag=True, array_like=True):
    """The API process is there, but has nothing to send."""


class Hello(msgspec.Struct, tag=True, array_like=True):
    """The first message of an engine process: the sizes of the model that it has loaded, and of its batches.

    With the agreement of a quantised model with float32. An engine for other machines says more about itself.
    """

    dimensions: Size
    embeds_width: Size
    max_batch_tokens: Size
    cosine_with_float32: Annotated[float, msgspec.Meta(ge=-1.1, le=1.1)] | None = None
    probe: tuple[Annotated[list[Size], msgspec.Meta(max_length=MAX_PROBE_TOKENS)], Name] | None = None
    """Token ids, and the ``wire_name`` of params that have defaults, of a row that the model can compute."""
    model: Name = ""
    """Its name there."""
    files: Name = ""
    weights: Name = ""
    """Digests of the model's files: see ``ModelDigest``."""
    zone: Name = ""
    identity: Name = ""
    """Of the process: it may be reached by several addresses."""
    resident_bytes: Bytes = 0
    device_bytes: Bytes = 0
    """What the model takes there: see ``ModelMemory``."""


class Values(msgspec.Struct, array_like=True):
    """The values of several rows for one of their params, concatenated: float32.

    The value of a row has the shape (its length, ``*shape``). Of ``SparseVector``s the payload has all indices, int32,
    before all values.
    """

    lengths: list[Count]
    shape: tuple[Count, ...] = ()
    is_sparse: bool = False


class Outputs(msgspec.Struct, tag=True, array_like=True):
    """``PoolingOutput``s of one batch whose values are of the same kinds; ``values`` has one item for each param."""

    queue_s: list[Seconds]
    forward_s: Seconds
    copy_s: Seconds
    values: list[Values]


class Failure(msgspec.Struct, tag=True, array_like=True):
    """Rows that failed: the name of one of ``FAILURES``, and its message."""

    kind: Name
    message: Name


class Answers(msgspec.Struct, tag=True, array_like=True):
    """Finished and failed rows, and the engine's load: queued tokens of all connections, and the measured rates.

    Without rows it is a heartbeat. ``seconds_per_token`` are float64, as in ``SecondsPerToken``; ``stall_reason`` is
    the engine's.
    """

    parts: Parts
    waiting_tokens: Annotated[int, msgspec.Meta(ge=0, le=MAX_WAITING_TOKENS)]
    tokens_per_s: Annotated[float, msgspec.Meta(ge=0)]
    seconds_per_token: Annotated[bytes, msgspec.Meta(min_length=8 * WORK_CLASSES, max_length=8 * WORK_CLASSES)]
    stall_reason: Name = ""


class Leaving(msgspec.Struct, tag=True, array_like=True):
    """The engine is shutting down: it computes what it has, and is to get no more rows."""


ToEngine: TypeAlias = Submit | Withdraw | CloseScope | Heartbeat
FromEngine: TypeAlias = Hello | Answers | Leaving


@define(eq=False)
class Frame:
    """Rows or answers that are sent together, with their arrays."""

    parts: list[Part] = field(init=False, factory=list)
    buffers: list[Buffer] = field(init=False, factory=list)
    _rows: int = field(init=False, default=0)
    _nbytes: int = field(init=False, default=0)

    def add(self, ids: list[int], content: Rows | Outputs | Failure, buffers: Sequence[Buffer] = ()) -> None:
        """Add rows or their outcome. Raises what msgspec raises, and ``ValueError`` for a part that is too large."""
        encoded = msgspec.msgpack.encode(content, enc_hook=numbers_of)
        nbytes = sum(map(len, buffers))
        if len(encoded) > _most_bytes(len(ids)) or nbytes > MAX_PAYLOAD_BYTES - FULL_FRAME_BYTES:
            raise ValueError(f"{len(encoded)} and {nbytes} bytes are too many")
        self.parts.append(Part(ids, nbytes, msgspec.Raw(encoded)))
        self.buffers += buffers
        self._rows += len(ids)
        self._nbytes += nbytes

    @property
    def is_full(self) -> bool:
        """Whether it is sent before more is added."""
        return self._rows >= FULL_FRAME_ROWS or self._nbytes >= FULL_FRAME_BYTES


def _most_bytes(rows: int) -> int:
    """Return how many bytes a part with so many rows may have, without its arrays."""
    return MAX_PART_BYTES + BYTES_OF_ROW * (rows - 1)


def fits_in_part(rows: int, nbytes: int) -> bool:
    """Return whether so many rows, with so many bytes of arrays, may be one part: one row always may."""
    return rows <= 1 or (rows <= FULL_FRAME_ROWS and nbytes <= FULL_FRAME_BYTES)


def parts_of(parts: Sequence[Part], payload: memoryview) -> Iterator[tuple[Part, Payload]]:
    """Yield each part of a frame with its bytes of the payload, which may be fewer than its ``nbytes``."""
    begin = 0
    for part in parts:
        yield part, Payload(payload[begin : begin + part.nbytes])
        begin += part.nbytes
