"""The messages between API processes and an engine process: rows to the engine, answers back.

They are msgspec structs and not attrs classes because msgspec sends those as arrays and distinguishes those of a tagged
union. Rows and answers that have everything in common but their numbers travel as one part of a frame: what they share
is encoded once, and each kind of array is one array, the rows' concatenated.
"""

from typing import Annotated, Any, TypeAlias

import msgspec
import numpy.typing as npt

from trio_pool_serve.processes.framed_stream import MAX_TEXT
from trio_pool_serve.types import ImageFeatures

FULL_FRAME_ROWS = 1024
"""A frame with this many rows is sent before more are added to it."""

MAX_SHARE = 1e6

Array: TypeAlias = npt.NDArray[Any]

Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]

Size: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
Bytes: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=2**50)]
Seconds: TypeAlias = Annotated[float, msgspec.Meta(ge=0, le=1e9)]
Name: TypeAlias = Annotated[str, msgspec.Meta(max_length=MAX_TEXT)]
Counted: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=2**40)]
Launches: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=1024)]
RowNumbers: TypeAlias = Annotated[list[int], msgspec.Meta(max_length=FULL_FRAME_ROWS)]


class LonePrompt(msgspec.Struct, array_like=True, frozen=True):
    """What a prompt has that is not sent together with others': see ``RenderedPrompt``."""

    embeds: Array | None
    chunks: Array | None
    images: ImageFeatures | None


class Rows(msgspec.Struct, array_like=True):
    """``PoolingRequest``s with equal params and the same kinds of arrays; a row with a ``LonePrompt`` is alone.

    ``token_ids`` and ``type_ids`` (int32) and ``kept`` (bool) have an element for each token of all rows;
    ``instruction_tokens`` and ``attended`` have one for each row, or one that is the same for all.
    """

    lengths: list[Annotated[int, msgspec.Meta(ge=1)]]
    """Tokens of each row."""
    instruction_tokens: list[int]
    attended: list[int | None]
    token_ids: Array
    type_ids: Array | None
    kept: Array | None
    lone: LonePrompt | None
    params: list[tuple[str, Any]]
    """The ``wire_name`` and fields of each. At the end: their arrays are taken when their classes are known."""


class Part(msgspec.Struct, array_like=True):
    """Encoded ``Rows`` or ``Outputs``, and the number of the payload's bytes that belong to them.

    ``ids`` are the numbers that the API process has given the rows, unique for one connection.
    """

    ids: RowNumbers
    nbytes: Count
    content: msgspec.Raw


Parts: TypeAlias = Annotated[list[Part], msgspec.Meta(max_length=FULL_FRAME_ROWS)]


class QueueState(msgspec.Struct, array_like=True, frozen=True):
    """What an API process has admitted and not answered, the rows included that devices have."""

    tokens: Counted = 0
    clients: Annotated[int, msgspec.Meta(ge=1)] = 1
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
    rank: Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)] = 0
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
    """The API process is there; between machines, one is sent if nothing else is.

    Another is sent when it has admitted twice as much as it said, or only half of what was more than a batch.
    """

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
    fingerprint: Annotated[str, msgspec.Meta(pattern=r"\A([0-9a-f]{16})?\Z")] = ""
    dtype: Name = ""
    backend: Name = ""
    """What computes its outputs: see ``ComputedBy``."""


class Values(msgspec.Struct, array_like=True):
    """The values of several rows for one of their params, concatenated: float32, of shape (its length, …) for each.

    ``indices`` (int32) are those of ``SparseVector``s.
    """

    lengths: list[Count]
    values: Array
    indices: Array | None = None


class Failure(msgspec.Struct, array_like=True):
    """Why rows have no outputs: the name of one of ``FAILURES``, and its message."""

    kind: Name
    message: Name


class Outputs(msgspec.Struct, array_like=True):
    """``PoolingOutput``s of one batch whose values are of the same kinds; ``values`` has one item for each param."""

    queue_s: Seconds = 0.0
    """From the arrival of the rows to the launch."""
    forward_s: Seconds = 0.0
    copy_s: Seconds = 0.0
    values: list[Values] = []
    failure: Failure | None = None
    """Of all of them."""


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
    others_share: Annotated[float, msgspec.Meta(ge=0, le=MAX_SHARE)] = 0.0
    """Tokens of other API processes computed for each token that this one has admitted: they have turns."""
    others_small_requests: Count = 0
    """Small requests of other API processes, so far."""
    seconds_per_token: Seconds = 0.0
    """Measured lately, while rows of any API process were left waiting; 0 before."""
    stall_reason: Name = ""


class Leaving(msgspec.Struct, tag=True, array_like=True):
    """The engine is shutting down: it computes what it has, and is to get no more rows."""


ToEngine: TypeAlias = Submit | Withdraw | Heartbeat
FromEngine: TypeAlias = Hello | Answers | Leaving
