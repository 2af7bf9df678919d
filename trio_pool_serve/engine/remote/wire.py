"""The messages between API processes and an engine process: rows to the engine, answers back.

They are msgspec structs and not attrs classes because msgspec sends those as arrays and distinguishes those of a tagged
union. Rows and answers that have everything in common but their numbers travel as one part of a frame: what they share
is encoded once, and each kind of array is one array, the rows' concatenated. Each part is encoded separately, and its
arrays are in the frame's payload in the order of the parts: one that cannot be encoded or decoded fails alone. What can
be sent as one part is found by trying: see ``frames_of``.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Annotated, Any, TypeAlias, TypeVar

import msgspec
from attrs import define, field

from trio_pool_serve.engine.remote.arrays import ArrayHeader, Payload
from trio_pool_serve.processes.framed_stream import MAX_HEADER_BYTES, MAX_PAYLOAD_BYTES, MAX_TEXT, Buffer

T = TypeVar("T")

FULL_FRAME_ROWS = 1024
FULL_FRAME_BYTES = 2**20
"""A frame with this many rows, or this many bytes of their arrays, is sent before more are added to it: the receiver
can begin, and no more is copied at once."""

MAX_PART_BYTES = MAX_HEADER_BYTES // FULL_FRAME_ROWS // 2
"""Of a part without its arrays and what is of each row alone, so that a full frame's parts fit into a header."""

BYTES_OF_ROW = 256
"""Most bytes of a part that are of one row alone: numbers of up to nine bytes."""

MAX_SHARE = 1e6

Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]

Size: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
Bytes: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=2**50)]
Seconds: TypeAlias = Annotated[float, msgspec.Meta(ge=0, le=1e9)]
Name: TypeAlias = Annotated[str, msgspec.Meta(max_length=MAX_TEXT)]
Counted: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=2**40)]
Clients: TypeAlias = Annotated[int, msgspec.Meta(ge=1)]
Share: TypeAlias = Annotated[float, msgspec.Meta(ge=0, le=MAX_SHARE)]
Rank: TypeAlias = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
Launches: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=1024)]
RowNumbers: TypeAlias = Annotated[list[int], msgspec.Meta(max_length=FULL_FRAME_ROWS)]


class OptionalArrays(msgspec.Struct, array_like=True):
    """Headers of the arrays that one prompt has besides those with an element for each token."""

    embeds: ArrayHeader | None = None
    chunks: ArrayHeader | None = None
    images: list[tuple[str, ArrayHeader]] | None = None
    image_tokens: tuple[int, ...] = ()


class Rows(msgspec.Struct, array_like=True):
    """``PoolingRequest``s with equal params and the same kinds of arrays.

    The payload has the token ids of all (int32), then the arrays that are named in ``token_arrays``, with as many
    elements, the ``optional_arrays`` of a row, which is alone then, and the arrays of ``params``. Lists that are not of
    ``lengths`` have one item for each row, or one that is the same for all.
    """

    lengths: list[Annotated[int, msgspec.Meta(ge=1)]]
    """Tokens of each row."""
    params: list[tuple[str, Any]]
    """The ``wire_name`` and fields of each; a field that is an array is its header."""
    instruction_tokens: list[int]
    attended: list[int | None]
    token_arrays: tuple[str, ...] = ()
    """Of ``type_ids`` (int32) and ``kept`` (bool)."""
    optional_arrays: OptionalArrays | None = None


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


class QueueState(msgspec.Struct, array_like=True, frozen=True):
    """What an API process has admitted and not answered, the rows included that devices have."""

    tokens: Counted = 0
    clients: Clients = 1
    small_requests: Counted = 0
    """Small requests whose rows have all left the queue, so far."""


class BatchFacts(msgspec.Struct, array_like=True):
    """What a device server is told of a batch, which its API process has taken from its queue."""

    number: Count
    """Unique for one connection."""
    rows: Annotated[int, msgspec.Meta(ge=1, le=2**20)]
    """Once they are all there, it can be computed."""
    key: Name = ""
    """Rows of other batches are computed beside these only if it is the same."""
    rank: Rank = 0
    queue: QueueState = QueueState()
    is_planned: bool = False
    """It is background work, computed when nothing else waits, in exactly this batch."""
    is_suspect: bool = False
    """It is computed alone: another device was lost with it."""


class Submit(msgspec.Struct, tag=True, array_like=True):
    """Compute these rows: some or all of those of one batch. Each frame of it says the same about it."""

    parts: Parts
    batch: BatchFacts


class Withdraw(msgspec.Struct, tag=True, array_like=True):
    """No client waits for these rows any more: those that are not launched are not computed."""

    ids: RowNumbers


class Heartbeat(msgspec.Struct, tag=True, array_like=True):
    """The API process is there. Sent if nothing else is, or if it has admitted twice or half as much as it said."""

    queue: QueueState


CREDITS = 2
"""Batches that an API process may have at a device server for each that is computed there at a time: one is ready when
another is done, also if other processes have none. With one, a process whose neighbours idled had 29 % fewer rows/s
(simulated, passes of 13 ms). A credit comes back with the answers to a batch."""


class Hello(msgspec.Struct, tag=True, array_like=True):
    """The first message of an engine process: the sizes of the model that it has loaded, and of its batches.

    With the agreement of a quantised model with float32. An engine for other machines says more about itself.
    """

    dimensions: Size
    embeds_width: Size
    max_batch_tokens: Size
    cosine_with_float32: Annotated[float, msgspec.Meta(ge=-1.1, le=1.1)] | None = None
    probe: tuple[Annotated[list[Size], msgspec.Meta(max_length=4096)], Name] | None = None
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
    launches: Launches = 1
    """Batches that it computes at a time."""
    pads: bool = True
    """Whether padding is computed."""
    planned_launches: Annotated[int, msgspec.Meta(ge=0, le=1024)] = 0
    """Planned batches that it computes beside others, at idle priority; 0 if only while there are no others."""


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

    queue_s: Seconds
    """From the arrival of the rows to the launch."""
    forward_s: Seconds
    copy_s: Seconds
    values: list[Values]


class Failure(msgspec.Struct, tag=True, array_like=True):
    """Rows that failed: the name of one of ``FAILURES``, and its message."""

    kind: Name
    message: Name


class Done(msgspec.Struct, array_like=True):
    """A batch all rows of which are answered: its credit returns.

    ``device_s`` are the seconds for which it occupied the device, 0 if that says nothing.
    """

    batch: Count
    device_s: Seconds


class Answers(msgspec.Struct, tag=True, array_like=True):
    """Finished and failed rows, and how the device is.

    Without rows it is a heartbeat. ``stall_reason`` is empty if batches come back.
    """

    parts: Parts
    done: Annotated[list[Done], msgspec.Meta(max_length=FULL_FRAME_ROWS)]
    budget: Size
    """The token budget of a batch now."""
    computed_tokens: Count = 0
    """Of all batches so far, those of all API processes."""
    others_share: Share = 0.0
    """Tokens of other API processes computed for each token that waits in this one: they have turns."""
    others_small_requests: Count = 0
    """Small requests of other API processes, so far."""
    left_waiting: bool = False
    """Whether rows were waiting when the latest batch was computed."""
    stall_reason: Name = ""


class Leaving(msgspec.Struct, tag=True, array_like=True):
    """The engine is shutting down: it computes what it has, and is to get no more rows."""


ToEngine: TypeAlias = Submit | Withdraw | Heartbeat
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
        encoded = msgspec.msgpack.encode(content)
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


def frames_of(
    groups: Iterable[Sequence[tuple[int, T]]],
    encode: Callable[[list[T]], tuple[Rows | Outputs | Failure, list[Buffer]]],
    refuse: Callable[[Frame, int, Exception], None],
    divide: Callable[[Sequence[tuple[int, T]]], Sequence[Sequence[tuple[int, T]]]],
) -> Iterator[Frame]:
    """Yield frames with numbered rows or outcomes: each group as one part if that is possible, else divided.

    ``refuse`` is called with the number of one that cannot be sent, even alone, and with what ``encode`` has raised.
    """
    frame = Frame()
    for group in filter(None, groups):
        left = [group]
        while left:
            together = left.pop()
            try:
                frame.add([number for number, _ in together], *encode([each for _, each in together]))
            except Exception as error:  # fields of params may be of any type, and heads may return anything
                if len(together) > 1:
                    left += reversed(divide(together))
                else:
                    refuse(frame, together[0][0], error)
            if frame.is_full:
                yield frame
                frame = Frame()
    if frame.parts:
        yield frame


def halves(group: Sequence[T]) -> Sequence[Sequence[T]]:
    """Return both halves: one of the rows may be guilty, or they are too many."""
    middle = len(group) // 2
    return group[:middle], group[middle:]


def reason_of(error: Exception) -> str:
    """Return an error's class and message, whatever reading the message does."""
    return f"{type(error).__name__}: {message_of(error)}"


def message_of(error: Exception) -> str:
    """Return an error's message, whatever reading it does."""
    try:
        return str(error)
    except Exception:  # a plugin's class
        return "its message cannot be read"


def _most_bytes(rows: int) -> int:
    """Return how many bytes a part with ``rows`` rows may have, without its arrays."""
    return MAX_PART_BYTES + BYTES_OF_ROW * (rows - 1)


def fits_in_part(rows: int, nbytes: int) -> bool:
    """Return whether rows with ``nbytes`` bytes of arrays may be one part: one row always may."""
    return rows <= 1 or (rows <= FULL_FRAME_ROWS and nbytes <= FULL_FRAME_BYTES)


def parts_of(parts: Sequence[Part], payload: memoryview) -> Iterator[tuple[Part, Payload]]:
    """Yield each part of a frame with its bytes of the payload, which may be fewer than its ``nbytes``."""
    begin = 0
    for part in parts:
        yield part, Payload(payload[begin : begin + part.nbytes])
        begin += part.nbytes
