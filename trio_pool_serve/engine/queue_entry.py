"""A row in a queue, and the rows that one caller waits for together."""

import math
import time
from collections.abc import Callable, Iterable, Sequence
from hashlib import blake2b
from typing import Any, TypeAlias

import msgspec
import numpy as np
import trio
from attrs import define, field

from trio_pool_serve.engine.batching import batch_key
from trio_pool_serve.errors import NotFiniteError
from trio_pool_serve.types import PoolingOutput, PoolingRequest, SparseVector


class QueueEntry(msgspec.Struct, eq=False):
    """One row in the queue.

    ``settled`` is called on the loop with entries that are finished or have failed. It is the same object for all rows
    of one submitter, which gets its rows of one batch together. ``number`` identifies the row there.

    Not an attrs class: see ``types.py``.
    """

    request: PoolingRequest
    settled: "Settled" = lambda _: None
    queued_at: float = msgspec.field(default_factory=time.perf_counter)
    number: int = 0
    key: str = ""
    """The batch key: only rows with the same key are computed together."""
    output: PoolingOutput | None = None
    error: Exception | None = None
    is_abandoned: bool = False
    """No client waits for the row any more: if it has been launched, it is not computed again."""
    holder: Any = None
    """The ``RemoteDevice`` that it was sent to; in a device server, the ``SentBatch`` that it came with."""
    losses: int = 0
    """Devices that were lost while they had the row."""
    tokens: int = 0
    """Tokens of the request; set by the queue."""
    virtual_deadline: int = 0
    """In tokens on its client's clock; set by the queue."""

    @property
    def is_settled(self) -> bool:
        """Whether the row is finished or has failed."""
        return self.output is not None or self.error is not None

    def fail(self, error: Exception) -> None:
        """Set the error and call ``settled``."""
        self.error = error
        self.settled([self])

    def __repr__(self) -> str:
        state = "settled" if self.is_settled else "not settled"
        return f"<QueueEntry {self.number}, {self.request.tokens} tokens, {state}>"


Settled: TypeAlias = Callable[[Sequence[QueueEntry]], None]


def fail_unsettled(entries: Iterable[QueueEntry], error: Exception) -> None:
    """Fail the entries that are not settled."""
    for entry in entries:
        if entry.output is None and entry.error is None:
            entry.fail(error)


Outputs: TypeAlias = Sequence[tuple[int, PoolingOutput]]
"""Outputs of rows of one batch, each with the index of its row."""

_NONE = np.empty(0, np.float32)

RowsDone: TypeAlias = Callable[[Outputs], None]
"""Called on the loop with outputs as soon as they are computed. An exception fails the submission."""


def are_finite(outputs: Outputs) -> bool:
    """Return whether all numbers of outputs are finite."""
    values = [value for _, output in outputs for value in output.values]
    arrays = [value.values if isinstance(value, SparseVector) else value for value in values]
    if len(arrays) > 1:  # one by one, 64 vectors of 384 numbers take five times as long
        vectors = np.concatenate([_NONE, *[each for each in arrays if each.ndim == 1]])
        arrays = [vectors, *[each for each in arrays if each.ndim != 1]]
    # A sum that is finite takes a third of the time that looking at each number takes; one of large numbers may not be.
    return not [each for each in arrays if not (math.isfinite(np.vdot(each, each)) or np.isfinite(each).all())]


def require_finite(outputs: Outputs) -> None:
    """Raise ``NotFiniteError`` if outputs contain numbers that are not finite: JSON cannot represent them."""
    if not are_finite(outputs):
        raise NotFiniteError("The model's output for an input is not finite.")


@define(eq=False)
class Submission:
    """The rows of one ``submit_all``: an entry for each and one event for all; a task for each would cost more."""

    requests: Sequence[PoolingRequest]
    rows_done: RowsDone | None = None
    entries: dict[QueueEntry, int] = field(init=False)
    """Entries that are not settled, with their indices."""
    _outputs: list[PoolingOutput | None] = field(init=False)
    _error: Exception | None = field(default=None, init=False)
    _ended: trio.Event = field(init=False, factory=trio.Event)

    def __attrs_post_init__(self) -> None:
        settled, now = self._settle, time.perf_counter()
        self.entries = {
            QueueEntry(request, settled, now, key=batch_key(request)): index
            for index, request in enumerate(self.requests)
        }
        self._outputs = [None] * len(self.requests)

    def _settle(self, entries: Sequence[QueueEntry]) -> None:
        indices, outputs = [self.entries.pop(entry) for entry in entries], self._outputs
        for index, entry in zip(indices, entries, strict=True):
            outputs[index] = entry.output
            if entry.output is None:
                self._error = self._error or entry.error
        if self.rows_done is not None and self._error is None:
            try:
                self.rows_done([(index, output) for index in indices if (output := outputs[index]) is not None])
            except Exception as raised:
                self._error = raised  # not raised here: this runs in the engine, which has not failed
        if self._error is not None or not self.entries:
            self._ended.set()

    async def wait(self) -> list[PoolingOutput]:
        """Wait for all rows. Raises the error of the first that failed. Cancellation: at once."""
        if self.requests:
            await self._ended.wait()
        if self._error is not None:
            raise self._error
        return [output for output in self._outputs if output is not None]


def row_digest(request: PoolingRequest, params: bytes = b"") -> bytes:
    """Return a cryptographic digest of all inputs of a row's computation; for an image it takes a millisecond."""
    prompt, adapter = request.prompt, request.adapter and request.adapter.digest
    images = {} if prompt.images is None else prompt.images.arrays
    arrays = [prompt.token_ids, prompt.type_ids, prompt.kept, prompt.chunks, prompt.embeds, *images.values()]
    kinds = [None if array is None else (array.dtype.str, array.shape) for array in arrays]
    # It determines the length of everything that follows.
    header = msgspec.msgpack.encode((params, adapter, prompt.instruction_tokens, prompt.attended, prompt.route, kinds))
    digest = blake2b(header, digest_size=32)
    for array in arrays:
        if array is not None:
            digest.update(array.tobytes())
    return digest.digest()
