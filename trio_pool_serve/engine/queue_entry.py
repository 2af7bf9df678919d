"""A row in a queue."""

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import msgspec

from trio_pool_serve.types import PoolingOutput, PoolingRequest


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
        if not entry.is_settled:
            entry.fail(error)
