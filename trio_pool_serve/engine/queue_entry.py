"""A row in a queue, and the delivery of outputs to those that have submitted rows."""

import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec

from trio_pool_serve.types import PoolingOutput, PoolingRequest

if TYPE_CHECKING:
    from trio_pool_serve.engine.waiting_rows import QueueClass

MAX_DELIVERED_ROWS = 512
"""Rows of one submitter that are delivered to it at once."""

SUBMITTERS_BETWEEN_CHECKPOINTS = 4
"""Each may wake a request, which is answered in half a millisecond or more: so other requests, such as ``/health``, do
not wait for all of a batch."""


class QueueEntry(msgspec.Struct, eq=False):
    """One row in the queue.

    ``settled`` is called on the loop with entries that are finished or have failed. It is the same object for all rows
    of one submitter, which gets those of one batch together. ``number`` identifies the row there.

    Not an attrs class: see ``types.py``.
    """

    request: PoolingRequest
    settled: "Settled" = lambda _: None
    queued_at: float = msgspec.field(default_factory=time.perf_counter)
    number: int = 0
    key: str = ""
    """The batch key: only rows with the same one are computed together."""
    output: PoolingOutput | None = None
    error: Exception | None = None
    is_abandoned: bool = False
    """No client waits for the row any more: if it has been launched, it is not computed again."""
    holder: Any = None
    """The ``RemoteDevice`` that it was sent to; at a device server, the ``SentBatch`` that it came with."""
    losses: int = 0
    """Devices that were lost while they had the row."""
    tokens: int = 0
    """Those of the request; set by the queue, as the next."""
    virtual_deadline: int = 0
    """In tokens on its client's clock."""
    queue_class: "QueueClass | None" = None
    """Set while the row waits."""

    @property
    def is_settled(self) -> bool:
        """Whether the row is finished or has failed."""
        return self.output is not None or self.error is not None

    def finish(self, output: PoolingOutput) -> None:
        """Set the output and call ``settled``."""
        self.output = output
        self.settled([self])

    def fail(self, error: Exception) -> None:
        """Set the error and call ``settled``."""
        self.error = error
        self.settled([self])

    def __repr__(self) -> str:
        state = "settled" if self.is_settled else "waiting" if self.queue_class else "not settled"
        return f"<QueueEntry {self.number}, {self.request.tokens} tokens, {state}>"


Settled: TypeAlias = Callable[[Sequence[QueueEntry]], None]

Outcome: TypeAlias = tuple[QueueEntry, PoolingOutput]


def by_submitter(outcomes: Iterable[Outcome]) -> list[list[Outcome]]:
    """Return the outcomes in slices, each of one submitter's rows. Between some of them there are to be checkpoints."""
    together: dict[Settled, list[Outcome]] = {}
    for outcome in outcomes:
        settled = outcome[0].settled
        if settled in together:
            together[settled].append(outcome)
        else:
            together[settled] = [outcome]
    return [
        rows[begin : begin + MAX_DELIVERED_ROWS]
        for rows in together.values()
        for begin in range(0, len(rows), MAX_DELIVERED_ROWS)
    ]


def finish_together(outcomes: Sequence[Outcome]) -> None:
    """Finish rows of one submitter, at least one."""
    for entry, output in outcomes:
        entry.output = output
    outcomes[0][0].settled([entry for entry, _ in outcomes])
