"""Rows that wait for a batch."""

import time
from collections.abc import Callable, Iterator

import trio
from attrs import define, field

from trio_pool_serve.types import Batch, PoolingOutput, PoolingRequest


def _ignore(entry: "QueueEntry") -> None:
    """Tell nobody."""


@define(eq=False)
class QueueEntry:
    """One waiting row. ``settled(entry)`` is called on the loop once it is finished or has failed."""

    request: PoolingRequest
    settled: Callable[["QueueEntry"], None] = field(default=_ignore, repr=False)
    queued_at: float = field(factory=time.perf_counter)
    output: PoolingOutput | None = None
    error: Exception | None = None

    @property
    def is_settled(self) -> bool:
        """Whether it is finished or has failed."""
        return self.output is not None or self.error is not None

    def finish(self, output: PoolingOutput) -> None:
        """Hand over the row."""
        self.output = output
        self.settled(self)

    def fail(self, error: Exception) -> None:
        """Hand over what it failed by."""
        self.error = error
        self.settled(self)


@define(eq=False)
class RequestQueue:
    """Entries in order of priority, then age. Withdrawn entries leave at once.

    A memory channel would not do: nothing can be taken out of its middle.
    """

    tokens: int = field(default=0, init=False)
    """Tokens of all waiting rows."""
    _by_priority: dict[int, dict[QueueEntry, None]] = field(init=False, factory=dict)
    _not_empty: trio.Event = field(init=False, factory=trio.Event)

    def __len__(self) -> int:
        return sum(map(len, self._by_priority.values()))

    def __iter__(self) -> Iterator[QueueEntry]:
        for priority in sorted(self._by_priority):
            yield from self._by_priority[priority]

    def put_nowait(self, entry: QueueEntry) -> None:
        """Append an entry."""
        self._by_priority.setdefault(entry.request.priority, {})[entry] = None
        self.tokens += entry.request.tokens
        self._not_empty.set()

    def withdraw(self, entry: QueueEntry) -> None:
        """Take an entry out; one that is not waiting any more is let be."""
        waiting = self._by_priority.get(entry.request.priority, {})
        if entry not in waiting:
            return
        del waiting[entry]
        self.tokens -= entry.request.tokens
        if not waiting:
            del self._by_priority[entry.request.priority]

    def take_batch(self, max_tokens: int) -> list[QueueEntry]:
        """Take the first entries whose padded tokens stay within ``max_tokens``; at least one if any.

        Stops at the first that does not fit, so that nothing is overtaken for ever.
        """
        taken: list[QueueEntry] = []
        longest = 0
        for entry in self:
            longest = max(longest, entry.request.tokens)
            if taken and longest * (len(taken) + 1) > max_tokens:
                break
            taken.append(entry)
        for entry in taken:
            self.withdraw(entry)
        return taken

    async def wait_not_empty(self) -> None:
        """Wait for an entry. Cancellation: at once; nothing is taken."""
        while not self._by_priority:
            self._not_empty = trio.Event()
            await self._not_empty.wait()

    def __repr__(self) -> str:
        return f"<RequestQueue {len(self)} rows, {self.tokens} tokens>"


def batch_of(entries: list[QueueEntry]) -> Batch:
    """Return the batch that computes these entries, row for row."""
    return Batch(tuple(entry.request for entry in entries))
