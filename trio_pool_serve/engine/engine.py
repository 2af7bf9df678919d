"""The one way to compute."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Literal, TypeAlias

import trio
from attrs import frozen

from trio_pool_serve.engine.queue import QueueEntry
from trio_pool_serve.engine.submission import RowDone, Submission
from trio_pool_serve.types import PoolingOutput, PoolingRequest, QueryScope

EngineState: TypeAlias = Literal["loading", "ready", "dead"]


@frozen
class EngineStatistics:
    """What an engine is doing now."""

    state: EngineState
    queued_rows: int
    queued_tokens: int
    in_flight_batches: int
    oldest_in_flight_s: float
    """Seconds since the oldest launched batch was launched; 0 with none in flight."""
    admitted_tokens: int
    """Estimated tokens of the requests that have been admitted and not finished."""
    tokens_per_s: float
    """Rate at which rows have lately been finished; 0 before the first batch."""
    batches: int
    failed_batches: int
    held_bytes: int
    """Bytes of the device that queries of late interaction hold for the requests they belong to."""


class Engine(ABC):
    """Takes rows, answers rows. Everything above it is the same wherever the computing happens."""

    @abstractmethod
    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Load, then compute until cancelled; ``started`` at once, before loading.

        Raises ``ModelLoadError`` when there is nothing to serve and ``EngineDeadError`` when the engine
        cannot go on; by then every waiter has been failed. Cancellation: every waiter fails with
        ``EngineDeadError``, and a device call that is running is abandoned to its thread.
        """

    async def submit(self, request: PoolingRequest) -> PoolingOutput:
        """Compute one row. Raises and is cancelled as ``submit_all``."""
        (output,) = await self.submit_all([request])
        return output

    async def submit_all(
        self, requests: Sequence[PoolingRequest], row_done: RowDone | None = None
    ) -> list[PoolingOutput]:
        """Compute rows; return them in the order of the requests.

        Raises ``EngineLoadingError``, ``EngineDeadError``, or what the first row failed by: ``BatchFailedError``, or
        whatever ``row_done`` raises. Then, and on cancellation, rows that have not been launched leave the queue;
        those that have are computed, and dropped.
        """
        submission = Submission(requests, row_done)
        try:
            for entry in list(submission.entries):
                self.submit_nowait(entry)
            return await submission.wait()
        finally:
            submission.row_done = None  # rows that were launched may still come
            for entry in submission.entries:
                self.withdraw(entry)

    @abstractmethod
    def submit_nowait(self, entry: QueueEntry) -> None:
        """Have a row computed; its entry is settled on the loop. Raises as ``submit_all`` when not ready."""

    @abstractmethod
    def withdraw(self, entry: QueueEntry) -> None:
        """Take a row back that nobody waits for any more; one that has been launched is computed, and dropped."""

    @abstractmethod
    def admit(self, tokens: int) -> AbstractContextManager[None]:
        """Hold room for a request of about ``tokens`` tokens while its work is done.

        Raises ``OverloadedError`` when the queue is full, and what ``submit`` raises when not ready.
        """

    @abstractmethod
    def open_scope(self) -> AbstractContextManager[QueryScope]:
        """Hold a place on the device for one request's queries; all that it holds is freed on leaving.

        Raises what ``submit`` raises when not ready.
        """

    @property
    @abstractmethod
    def dimensions(self) -> int:
        """Length of the vectors when nothing is cut off. Raises what ``submit`` raises when not ready."""

    @property
    @abstractmethod
    def embeds_width(self) -> int:
        """Width of the token embeddings that rows may bring in place of ids; 0 if they may not. Raises likewise."""

    @abstractmethod
    async def wait_ready(self) -> None:
        """Wait until the model is loaded. Raises ``EngineDeadError`` if it never will be.

        Cancellation: at once; nothing is held.
        """

    @abstractmethod
    def statistics(self) -> EngineStatistics:
        """Return what the engine is doing now."""
