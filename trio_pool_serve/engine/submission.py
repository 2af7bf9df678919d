"""Rows that one caller waits for together."""

from collections.abc import Callable, Sequence
from typing import TypeAlias

import trio
from attrs import define, field

from trio_pool_serve.engine.queue import QueueEntry
from trio_pool_serve.types import PoolingOutput, PoolingRequest

RowDone: TypeAlias = Callable[[int, PoolingOutput], None]
"""Called on the loop with a row's index and answer as soon as it is there. What it raises fails the submission."""


@define(eq=False)
class Submission:
    """An entry for each row, and one event for all of them: a task for each would cost more than its row."""

    requests: Sequence[PoolingRequest]
    row_done: RowDone | None = None
    entries: dict[QueueEntry, int] = field(init=False)
    """Those that are not settled, with their indices."""
    _outputs: list[PoolingOutput | None] = field(init=False)
    _error: Exception | None = field(default=None, init=False)
    _ended: trio.Event = field(init=False, factory=trio.Event)

    def __attrs_post_init__(self) -> None:
        self.entries = {QueueEntry(request, self._settle): index for index, request in enumerate(self.requests)}
        self._outputs = [None] * len(self.requests)

    def _settle(self, entry: QueueEntry) -> None:
        index = self.entries.pop(entry)
        self._outputs[index] = entry.output
        error = entry.error
        if entry.output is not None and self.row_done is not None and self._error is None:
            try:
                self.row_done(index, entry.output)
            except Exception as raised:
                # Not to whoever delivers: the row's batch, and the engine, have done nothing wrong.
                error = raised
        self._error = self._error or error
        if self._error is not None or not self.entries:
            self._ended.set()

    async def wait(self) -> list[PoolingOutput]:
        """Wait for all rows. Raises what the first of them failed by. Cancellation: at once."""
        if self.entries or self._error is not None:
            await self._ended.wait()
        if self._error is not None:
            raise self._error
        return [output for output in self._outputs if output is not None]
