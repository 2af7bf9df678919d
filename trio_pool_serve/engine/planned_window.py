"""Background work in windows, whose batches depend on nothing but the rows of the window.

In its last bits, a row's output depends on the rows beside it in its batch, and the batches of other requests depend on
what else waits at the time. So that a file gives the same bytes however often its run was interrupted, the batches of a
window are planned: once every member of the window (a line, or some rows of a table) waits for its rows or has ended,
all waiting rows are sorted by length and split into batches.
"""

import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager

import msgspec
from attrs import Factory, define, field

from trio_pool_serve.engine.batching import BatchLimits
from trio_pool_serve.engine.engine import Engine
from trio_pool_serve.engine.queue_entry import QueueEntry, RowsDone, fail_unsettled
from trio_pool_serve.types import PoolingOutput, PoolingRequest

_numbers = itertools.count(1)
"""Numbers of this process's planned batches."""


@define(eq=False)
class PlannedWindow:
    """The members of one window; each is a context, entered in a task of its own while it may submit rows.

    A batch has at most the engine's ``max_batch_tokens`` divided by ``token_divisor``.
    """

    size: int
    token_divisor: int = 1
    members: "list[WindowMember]" = field(
        init=False, default=Factory(lambda self: [WindowMember(self) for _ in range(self.size)], takes_self=True)
    )
    running: int = field(init=False, default=Factory(lambda self: self.size, takes_self=True))
    """Members that may still submit rows before the batches are planned."""

    def note_waiting(self) -> None:
        """Note that a member waits or has ended; after the last one, plan the batches."""
        self.running -= 1
        if self.running:
            return
        of_engines: dict[Engine, list[QueueEntry]] = {}
        for member in self.members:
            if member.waiting is not None:
                engine, entries = member.waiting
                of_engines.setdefault(engine, []).extend(entries)
                member.waiting = None
                self.running += 1
        for engine, entries in of_engines.items():
            self.submit(engine, entries)

    def submit(self, engine: Engine, entries: Sequence[QueueEntry]) -> None:
        """Submit rows in planned batches. An error of the engine becomes the rows' error."""
        try:
            max_tokens = max(1, engine.facts.max_batch_tokens // self.token_divisor)
            # Rows that fail at once are in no batch: its other rows would wait for them.
            for batch in planned(engine.fail_refused(entries), max_tokens):
                number = next(_numbers)
                for entry in batch:
                    entry.request = msgspec.structs.replace(entry.request, planned=number)
                engine.submit_nowait(*batch)
        except Exception as error:
            fail_unsettled(entries, error)


@define(eq=False)
class WindowMember(AbstractContextManager["WindowMember"]):
    """Submits the rows of one member of a window."""

    window: PlannedWindow
    waiting: tuple[Engine, Sequence[QueueEntry]] | None = field(default=None, init=False)
    """The rows that wait for other members of the window, and the engine to compute them."""

    def __exit__(self, *_: object) -> None:
        self.window.note_waiting()

    async def submit_all(
        self, engine: Engine, requests: Sequence[PoolingRequest], rows_done: RowsDone | None = None
    ) -> list[PoolingOutput]:
        """Compute rows together with those of other members; return outputs in the order of the requests.

        Rows with images or token embeddings hold memory until they are computed, so they are computed at once and only
        with rows of their own request. Raises and is cancelled as ``Engine.submit_all``.
        """

        def submit(*entries: QueueEntry) -> None:
            prompts = [entry.request.prompt for entry in entries]
            if any(prompt.images is not None or prompt.embeds is not None for prompt in prompts):
                self.window.submit(engine, entries)
            else:
                self.waiting = engine, entries
                self.window.note_waiting()

        try:
            return await engine.submit_all(requests, rows_done, submit)
        finally:
            if self.waiting is not None:  # cancelled before the batches were planned
                self.waiting = None
                self.window.running += 1


def planned(entries: Iterable[QueueEntry], max_tokens: int) -> Iterator[list[QueueEntry]]:
    """Yield batches of rows with one batch key and of similar length, the longest first.

    Rows of equal length keep their order.
    """
    left = deque(sorted(entries, key=lambda entry: (entry.key, -entry.request.tokens)))
    while left:
        budget, batch, key = BatchLimits(max_tokens).budget(), list[QueueEntry](), left[0].key
        while left and left[0].key == key and budget.try_add(left[0].request.tokens):
            batch.append(left.popleft())
        yield batch
