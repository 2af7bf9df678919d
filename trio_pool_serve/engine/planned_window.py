"""Background work in windows, computed in batches that depend on nothing but the rows of the window.

A row's numbers depend, in their last bits, on the rows beside it in its batch, and the batches of other requests on
what else waits at the time. So that the same file gives the same bytes, however often its computation was interrupted,
the batches of a window are planned: once every member of the window (a line, or some rows of a table) waits for its
rows or has ended, all rows that wait are sorted by length and cut into batches.
"""

import itertools
import secrets
from collections.abc import Iterable, Iterator, Sequence
from types import TracebackType
from typing import Self

import msgspec
from attrs import define, field

from trio_pool_serve.engine.batching import FREE_PADDING_DIVISOR, BatchBudget
from trio_pool_serve.engine.engine import Engine
from trio_pool_serve.engine.queue_entry import QueueEntry
from trio_pool_serve.engine.submission import RowDone, Submission
from trio_pool_serve.types import PlannedBatch, PoolingOutput, PoolingRequest

_numbers = itertools.count(1 + secrets.randbits(62))
"""Numbers of planned batches, which are unlikely to be another process's."""


@define(eq=False)
class PlannedWindow:
    """The members of one window; each is entered as a context, in a task of its own, for as long as it may submit rows.

    A batch has at most ``max_batch_tokens`` of the engine, divided by ``token_divisor``.
    """

    size: int
    token_divisor: int = 1
    members: "list[WindowMember]" = field(init=False)
    _running: int = field(init=False)
    """Members that may still submit rows before the others have theirs computed."""

    def __attrs_post_init__(self) -> None:
        self.members = [WindowMember(self) for _ in range(self.size)]
        self._running = self.size

    def note_waiting(self) -> None:
        """Count a member no longer as running: it waits, or has ended. Of the last one, plan the batches."""
        self._running -= 1
        if self._running:
            return
        waiting = [member for member in self.members if member.submission is not None]
        self._running += len(waiting)
        for engine in dict.fromkeys(member.engine for member in waiting if member.engine is not None):
            of_engine = [member.submission for member in waiting if member.engine is engine and member.submission]
            for member in waiting:
                if member.engine is engine:
                    member.submission = None
            self.submit(engine, [entry for submission in of_engine for entry in submission.entries])

    def note_resumed(self) -> None:
        """Count a member as running again that has waited, and was cancelled."""
        self._running += 1

    def submit(self, engine: Engine, entries: Sequence[QueueEntry]) -> None:
        """Submit rows in planned batches. What the engine raises is the rows' error."""
        try:
            max_tokens = max(1, engine.max_batch_tokens // self.token_divisor)
            # A row without tokens fails at once: the others of its batch would wait for it.
            engine.submit_nowait(*(entry for entry in entries if not entry.request.tokens))
            # So does one that has ended engine processes.
            left = engine.dispatcher.refuse_known([entry for entry in entries if entry.request.tokens])
            for batch in planned(left, max_tokens):
                number = next(_numbers)
                for entry in batch:
                    of_batch = PlannedBatch(number, len(batch))
                    entry.request = msgspec.structs.replace(entry.request, planned=of_batch)
                engine.submit_nowait(*batch)
        except Exception as error:
            for entry in entries:
                if not entry.is_settled:
                    entry.fail(error)


@define(eq=False)
class WindowMember:
    """Submits the rows of one member of a window."""

    window: PlannedWindow
    engine: Engine | None = field(default=None, init=False)
    submission: Submission | None = field(default=None, init=False)
    """Whose rows wait for the others of the window."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc_value: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.window.note_waiting()

    async def submit_all(
        self, engine: Engine, requests: Sequence[PoolingRequest], row_done: RowDone | None = None
    ) -> list[PoolingOutput]:
        """Compute rows, together with those of the other members; return them in the order of the requests.

        Rows with images are computed with those of their own request alone, and at once: they hold memory until they
        are computed. Raises and is cancelled as ``Engine.submit_all``.
        """
        submission = Submission(requests, row_done)

        def submit(*entries: QueueEntry) -> None:
            if any(_is_alone(entry) for entry in entries):
                self.window.submit(engine, entries)
            else:
                self.engine, self.submission = engine, submission
                self.window.note_waiting()

        try:
            return await engine.complete(submission, submit)
        finally:
            if self.submission is not None:  # cancelled before the batches were planned
                self.submission = None
                self.window.note_resumed()


def _is_alone(entry: QueueEntry) -> bool:
    prompt = entry.request.prompt
    return prompt.images is not None or prompt.embeds is not None


def planned(entries: Iterable[QueueEntry], max_tokens: int) -> Iterator[list[QueueEntry]]:
    """Yield batches of rows of about one length, the longest first; of equal length in the order of ``entries``."""
    batch: list[QueueEntry] = []
    budget = BatchBudget(max_tokens, max_tokens // FREE_PADDING_DIVISOR)
    for entry in sorted(entries, key=lambda entry: -entry.request.tokens):
        if not budget.try_add(entry.request.tokens):
            yield batch
            batch, budget = [], BatchBudget(max_tokens, max_tokens // FREE_PADDING_DIVISOR)
            budget.try_add(entry.request.tokens)
        batch.append(entry)
    if batch:
        yield batch
