"""The messages between API processes and an engine process: rows to the engine, answers back.

They are msgspec structs instead of attrs classes, since msgspec encodes structs as arrays and supports tagged unions of
them. Rows or answers that have everything in common but their numbers travel as one part of a frame: shared values are
encoded once, and the rows' arrays of each kind are concatenated.
"""

from typing import Annotated, Any, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from trio_pool_serve.processes.framed_stream import MAX_TEXT
from trio_pool_serve.types import (
    Adapter,
    ComputedBy,
    ImageFeatures,
    PoolingParams,
    PoolingRequest,
    RenderedPrompt,
    RunnerFacts,
)

FULL_FRAME_ROWS = 1024
"""A frame with this many rows is sent before more are added."""

MAX_SHARE = 1e6

Array: TypeAlias = npt.NDArray[Any]

Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]

Size: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
Bytes: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=2**50)]
Seconds: TypeAlias = Annotated[float, msgspec.Meta(ge=0, le=1e9)]
Name: TypeAlias = Annotated[str, msgspec.Meta(max_length=MAX_TEXT)]
Counted: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=2**40)]
RowNumbers: TypeAlias = Annotated[list[int], msgspec.Meta(max_length=FULL_FRAME_ROWS)]


class LonePrompt(msgspec.Struct, array_like=True, frozen=True):
    """The arrays of a prompt that are sent alone, not concatenated with other rows': see ``RenderedPrompt``."""

    embeds: Array | None
    chunks: Array | None
    images: ImageFeatures | None


class Rows(msgspec.Struct, array_like=True):
    """``PoolingRequest``s with equal params, one route, one adapter and the same kinds of arrays.

    A row with a ``LonePrompt`` is alone.

    ``token_ids`` and ``type_ids`` (int32) and ``kept`` (bool) have an element for each token of all rows;
    ``instruction_tokens`` and ``attended`` have one for each row, or one that is the same for all.
    """

    lengths: list[Annotated[int, msgspec.Meta(ge=1)]]
    """Number of tokens of each row."""
    instruction_tokens: list[int]
    attended: list[int | None]
    token_ids: Array
    type_ids: Array | None
    kept: Array | None
    lone: LonePrompt | None
    route: Count
    adapter: Adapter | None
    params: list[tuple[str, Any]]
    """The ``wire_name`` and fields of each. The last field: their arrays are read once their classes are known."""


class Part(msgspec.Struct, array_like=True):
    """Encoded ``Rows`` or ``Outputs``, and the number of the payload's bytes that belong to them.

    ``ids`` are the numbers of the rows, chosen by the API process and unique within a connection.
    """

    ids: RowNumbers
    nbytes: Count
    content: msgspec.Raw


Parts: TypeAlias = Annotated[list[Part], msgspec.Meta(max_length=FULL_FRAME_ROWS)]


class QueueState(msgspec.Struct, array_like=True, frozen=True):
    """Requests that an API process has admitted and not answered, including rows that devices have."""

    tokens: Counted = 0
    clients: Annotated[int, msgspec.Meta(ge=1)] = 1
    small_requests: Counted = 0
    """Small requests so far whose rows have all left the queue."""


class BatchFacts(msgspec.Struct, array_like=True):
    """Facts about a batch that an API process sends to a device server."""

    number: Count
    """Unique within a connection."""
    rows: Annotated[int, msgspec.Meta(ge=1, le=2**20)]
    """The batch can be computed once this many rows have arrived."""
    key: Name = ""
    """The batch key: only batches with the same key are joined."""
    rank: Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)] = 0
    queue: QueueState = QueueState()
    is_planned: bool = False
    """Background work, computed when nothing else waits, in exactly this batch."""
    is_suspect: bool = False
    """Computed alone: another device was lost with it."""


class Submit(msgspec.Struct, tag=True, array_like=True):
    """Compute these rows of a batch. Each frame of a batch repeats the same ``BatchFacts``."""

    parts: Parts
    batch: BatchFacts


class Withdraw(msgspec.Struct, tag=True, array_like=True):
    """No client waits for these rows any more: rows that are not launched are not computed."""

    ids: RowNumbers


class Heartbeat(msgspec.Struct, tag=True, array_like=True):
    """Shows that the API process is alive; between machines, sent if nothing else is.

    Also sent when admitted tokens have doubled since the last message, or halved from more than a batch.
    """

    queue: QueueState


CREDITS = 2
"""Batches that an API process may have at a device server, for each batch computed there at a time: the next is ready
when one is done, even if other processes have none. With one credit, a process whose neighbours idled had 29 % fewer
rows/s (simulated, passes of 13 ms). A credit returns with the answers to a batch."""


class Hello(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """The first message of an engine process: facts about the loaded model, and the process.

    Only engines for other machines set ``model``, ``files``, ``weights`` and ``identity``.
    """

    dimensions: Size
    """This and the following fields are as in ``RunnerFacts``."""
    embeds_width: Size
    max_batch_tokens: Size
    cosine_with_float32: Annotated[float, msgspec.Meta(ge=-1.1, le=1.1)] | None = None
    probe: tuple[Annotated[list[Size], msgspec.Meta(max_length=4096)], Name] | None = None
    """A row that the model can compute: token ids, and the ``wire_name`` of params with defaults."""
    model: Name = ""
    """The model's name there."""
    files: Name = ""
    weights: Name = ""
    """Digests of the model's files: see ``ModelDigest``."""
    zone: Name = ""
    identity: Name = ""
    """Identifies the process, which may be reached by several addresses."""
    resident_bytes: Bytes = 0
    device_bytes: Bytes = 0
    """Memory of the model there: see ``ModelMemory``."""
    launches: Annotated[int, msgspec.Meta(ge=1, le=1024)] = 1
    """``concurrent_launches``: batches computed at a time."""
    pads: bool = True
    planned_launches: Annotated[int, msgspec.Meta(ge=0, le=1024)] = 0
    """``background_launches``: planned batches computed beside others; 0 if they wait until there are no others."""
    fingerprint: Annotated[str, msgspec.Meta(pattern=r"\A([0-9a-f]{16})?\Z")] = ""
    dtype: Name = ""
    backend: Name = ""

    @classmethod
    def of(cls, facts: RunnerFacts, **about: Any) -> "Hello":
        """Return the message with the facts that API processes need, and other fields."""
        probe = facts.probe_request
        return cls(
            facts.dimensions,
            facts.embeds_width,
            facts.max_batch_tokens,
            facts.cosine_with_float32,
            None if probe is None else (probe.prompt.token_ids.tolist(), probe.params[0].wire_name),
            launches=facts.concurrent_launches,
            pads=facts.pads,
            planned_launches=facts.background_launches,
            **facts.computed_by._asdict(),
            **about,
        )

    @property
    def facts(self) -> RunnerFacts:
        """The facts in the message. A probe row whose params this process does not know is left out."""
        ids, name = self.probe or ([], "")
        kind = PoolingParams.by_name.get(name)
        return RunnerFacts(
            dimensions=self.dimensions,
            embeds_width=self.embeds_width,
            max_batch_tokens=self.max_batch_tokens,
            cosine_with_float32=self.cosine_with_float32,
            probe_request=None if kind is None else PoolingRequest(RenderedPrompt(np.array(ids, np.int32)), (kind(),)),
            concurrent_launches=self.launches,
            pads=self.pads,
            background_launches=self.planned_launches,
            computed_by=ComputedBy(self.fingerprint, self.dtype, self.backend),
        )


class Values(msgspec.Struct, array_like=True):
    """The values of several rows for one of their params, concatenated: float32, shape (length of the row, …) for each.

    ``indices`` (int32) belong to ``SparseVector``s.
    """

    lengths: list[Count]
    values: Array
    indices: Array | None = None


class Failure(msgspec.Struct, array_like=True):
    """Why rows have no outputs: the name of an error in ``FAILURES``, and its message."""

    kind: Name
    message: Name


class Outputs(msgspec.Struct, array_like=True):
    """``PoolingOutput``s of one batch whose values are of the same kinds; ``values`` has one item for each param."""

    queue_s: Seconds = 0.0
    """Seconds from the arrival of the rows to the launch."""
    forward_s: Seconds = 0.0
    copy_s: Seconds = 0.0
    values: list[Values] = []
    failure: Failure | None = None
    """Set if all rows of the part have failed."""


class Done(msgspec.Struct, array_like=True):
    """A batch whose rows are all answered: its credit returns.

    ``device_s``: seconds for which it occupied the device, of a pass with other rows the share of its tokens; 0 if they
    do not show the device's speed, as after a recovery.
    """

    batch: Count
    device_s: Seconds


class Answers(msgspec.Struct, tag=True, array_like=True):
    """Finished and failed rows, and the state of the device.

    Without rows it is a heartbeat. ``stall_reason`` is empty unless the device is stalled.
    """

    parts: Parts
    done: Annotated[list[Done], msgspec.Meta(max_length=FULL_FRAME_ROWS)]
    budget: Size
    """The current token budget of a batch."""
    computed_tokens: Count = 0
    """Tokens of all batches so far, of all API processes."""
    others_share: Annotated[float, msgspec.Meta(ge=0, le=MAX_SHARE)] = 0.0
    """Tokens of other API processes computed per token admitted by this one, since they take turns."""
    others_small_requests: Count = 0
    """Small requests of other API processes so far."""
    seconds_per_token: Seconds = 0.0
    """Recent rate while rows of any API process were left waiting; 0 before the first such batch."""
    stall_reason: Name = ""


class Leaving(msgspec.Struct, tag=True, array_like=True):
    """The engine is draining: it computes the rows that it has, and must get no more."""


ToEngine: TypeAlias = Submit | Withdraw | Heartbeat
FromEngine: TypeAlias = Hello | Answers | Leaving
