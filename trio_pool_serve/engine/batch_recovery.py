"""Recovery of a failed batch: its rows are computed again in halves, until the guilty ones are alone.

A guilty row among n costs at most log2(n) passes that fail, and as many that give its neighbours their outputs. The
total cost of a batch is bounded by time, by the number of passes, and by the number of passes that fail in a row, after
which the model itself must be broken.
"""

import logging
from collections.abc import Awaitable, Callable, Sequence
from enum import Enum

import trio
from attrs import define, field

from trio_pool_serve.engine.queue_entry import QueueEntry
from trio_pool_serve.errors import BatchFailedError, OutOfDeviceMemoryError

logger = logging.getLogger(__name__)

RETRY_S = 10.0
"""Maximum seconds to compute the rows of a failed batch again; other rows wait meanwhile."""

MAX_PASSES = 100
"""Maximum passes for one batch; enough for about ten guilty rows among a thousand."""

EXTRA_FAILURES = 2
"""Passes that may fail in a row beyond four descents to a single row, since several rows may be guilty."""


class Fault(Enum):
    """How a pass failed."""

    RAISED = "raised"
    OUT_OF_MEMORY = "out_of_memory"


@define(eq=False)
class BatchRecovery:
    """Computes the rows of one failed batch again, and settles each of them unless it is abandoned.

    ``compute(entries)`` computes entries as one batch and finishes them, or returns the fault.
    """

    compute: Callable[[list[QueueEntry]], Awaitable[Fault | None]]
    time_limit_s: float
    """No pass begins after this many seconds."""
    failed_rows: int = field(default=0, init=False)
    passes: int = field(default=0, init=False)
    _failures_in_a_row: int = field(default=0, init=False)
    _groups: list[list[QueueEntry]] = field(init=False, factory=list)
    """Rows still to be computed, each list as one batch."""

    async def run(self, entries: Sequence[QueueEntry], fault: Fault) -> None:
        """Settle the entries of a failed batch. Raises what ``compute`` raises.

        Cancellation: at once; entries that are not settled stay so.
        """
        deadline = trio.current_time() + self.time_limit_s
        max_failures = 4 * (len(entries) - 1).bit_length() + EXTRA_FAILURES
        by_sender: dict[object, list[QueueEntry]] = {}
        for entry in entries:
            by_sender.setdefault(entry.holder, []).append(entry)
        if len(by_sender) > 1:
            self._groups += by_sender.values()  # so one sender's guilty row costs the others one pass
        else:
            self._divide(list(entries), fault)
        while self._groups:
            rows = [entry for entry in self._groups.pop() if not entry.is_abandoned]
            if not rows:
                continue
            if trio.current_time() >= deadline or self.passes >= MAX_PASSES or self._failures_in_a_row >= max_failures:
                self.failed_rows += len(rows)
                for entry in rows:
                    entry.fail(BatchFailedError("The forward pass failed for the batch of this input."))
                continue
            self.passes += 1
            failed = await self.compute(rows)
            if failed is None:
                self._failures_in_a_row = 0
            else:
                self._failures_in_a_row += 1
                self._divide(rows, failed)
        logger.warning(
            "a batch of %d rows failed; recomputed in smaller batches, %d rows failed again (%d batches)",
            len(entries),
            self.failed_rows,
            self.passes,
        )

    def _divide(self, rows: list[QueueEntry], fault: Fault) -> None:
        """Queue both halves of a failed batch, the first half next; a single row fails."""
        middle = (len(rows) + 1) // 2
        if middle < len(rows):
            self._groups += rows[middle:], rows[:middle]
            return
        self.failed_rows += 1
        rows[0].fail(_error_of_row(fault, rows[0]))
        self._groups.sort(key=len)  # the largest next, so that a few guilty rows side by side do not look like all


def _error_of_row(fault: Fault, entry: QueueEntry) -> BatchFailedError | OutOfDeviceMemoryError:
    """Return the error of a row that failed alone."""
    if fault is Fault.OUT_OF_MEMORY:
        return OutOfDeviceMemoryError(
            f"The device has too little free memory for this input of {entry.request.tokens} tokens, even alone. "
            "Send a shorter one."
        )
    return BatchFailedError("The forward pass failed for this input.")
