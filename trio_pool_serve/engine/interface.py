"""The one way to compute."""

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from typing import Literal, TypeAlias

import trio
from attrs import frozen

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

    @abstractmethod
    async def submit(self, request: PoolingRequest) -> PoolingOutput:
        """Compute one row.

        Raises ``BatchFailedError``, ``EngineLoadingError`` or ``EngineDeadError``. Cancellation: a row
        that has not been launched leaves the queue; one that has is computed and its result dropped.
        """

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
