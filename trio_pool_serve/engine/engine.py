"""The interface of engines: rows in, outputs out; and the rows that one caller waits for together."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import trio
from attrs import asdict, define, field, frozen

from trio_pool_serve.engine.admission import AdmittedRequest, EstimatedWork
from trio_pool_serve.engine.model_memory import ModelMemory
from trio_pool_serve.engine.queue_entry import QueueEntry
from trio_pool_serve.errors import NotFiniteError
from trio_pool_serve.telemetry.gauges import Gauges
from trio_pool_serve.types import PoolingOutput, PoolingRequest, QueryScope, SparseVector

EngineState: TypeAlias = Literal["loading", "ready", "stalled", "dead"]
"""stalled: ready, but nothing comes back: a row that is submitted now may wait for long."""

ENGINE_STATES: tuple[EngineState, ...] = get_args(EngineState)

RowDone: TypeAlias = Callable[[int, PoolingOutput], None]
"""Called on the loop with a row's index and output as soon as it is computed. Its exceptions fail the submission."""


def require_finite(index: int, output: PoolingOutput) -> None:  # noqa: ARG001  (a ``RowDone``)
    """Raise ``NotFiniteError`` if an output has numbers that are not finite: JSON cannot represent them."""
    for value in output.values:
        if not np.isfinite(value.values if isinstance(value, SparseVector) else value).all():
            raise NotFiniteError("The model computed numbers for an input that are not finite.")


@define(eq=False)
class Submission:
    """The rows of one ``submit_all``: an entry for each and one event for all; a task for each would cost more."""

    requests: Sequence[PoolingRequest]
    row_done: RowDone | None = None
    entries: dict[QueueEntry, int] = field(init=False)
    """Entries that are not settled, with their indices."""
    _outputs: list[PoolingOutput | None] = field(init=False)
    _error: Exception | None = field(default=None, init=False)
    _ended: trio.Event = field(init=False, factory=trio.Event)

    def __attrs_post_init__(self) -> None:
        settled, now = self._settle, time.perf_counter()
        self.entries = {QueueEntry(request, settled, now): index for index, request in enumerate(self.requests)}
        self._outputs = [None] * len(self.requests)

    def _settle(self, entries: Sequence[QueueEntry]) -> None:
        for entry in entries:
            index = self.entries.pop(entry)
            self._outputs[index] = entry.output
            error = entry.error
            if entry.output is not None and self.row_done is not None and self._error is None:
                try:
                    self.row_done(index, entry.output)
                except Exception as raised:
                    error = raised  # not raised here: this runs in the engine, which has not failed
            self._error = self._error or error
        if self._error is not None or not self.entries:
            self._ended.set()

    async def wait(self) -> list[PoolingOutput]:
        """Wait for all rows. Raises the error of the first that failed. Cancellation: at once."""
        if self.entries or self._error is not None:
            await self._ended.wait()
        if self._error is not None:
            raise self._error
        return [output for output in self._outputs if output is not None]


@frozen
class EngineStatistics:
    """The state and the load of an engine at one moment; 0 for what other processes know."""

    state: EngineState
    queued_rows: int = 0
    queued_tokens: int = 0
    in_flight_batches: int = 0
    oldest_in_flight_s: float = 0.0
    """Seconds since the oldest launched batch was launched; 0 with none in flight."""
    admitted_tokens: int = 0
    """Tokens of the requests that are admitted and not computed; an estimate for those that are not rendered."""
    waiting_s: float = 0.0
    """Seconds that all admitted work will take, at the measured rates; 0 before the first batch."""
    tokens_per_s: float = 0.0
    """Tokens computed per second, as a moving average; 0 before the first batch."""
    batches: int = 0
    failed_batches: int = 0
    held_bytes: int = 0
    """Bytes of device memory that held queries take."""
    batch_token_budget: int = 0
    """The current token budget of a batch: less than configured after the device ran out of memory; 0 if unknown."""

    def gauges(self) -> Gauges:
        """Return what the engine's metrics have."""
        return {
            "engine": {
                "ready": float(self.state == "ready"),
                "stalled": float(self.state == "stalled"),
                "queued_rows": self.queued_rows,
                "queued_tokens": self.queued_tokens,
                "in_flight_batches": self.in_flight_batches,
                "oldest_in_flight_seconds": self.oldest_in_flight_s,
                "admitted_tokens": self.admitted_tokens,
                "waiting_seconds": self.waiting_s,
                "held_bytes": self.held_bytes,
                "batch_token_budget": self.batch_token_budget,
            }
        }


class Engine(ABC):
    """Computes rows, in this process or in another: the packages above do not know which."""

    @abstractmethod
    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Load the model, then compute until cancelled; ``task_status.started`` is called before loading.

        Raises ``ModelLoadError`` if the model cannot be loaded and ``EngineDeadError`` if the engine cannot go on; all
        waiting rows have failed by then. Cancellation: waiting rows fail with ``EngineDeadError``, and a device call
        that is running is abandoned to its thread.
        """

    async def submit(self, request: PoolingRequest) -> PoolingOutput:
        """Compute one row. Raises and is cancelled as ``submit_all``."""
        (output,) = await self.submit_all([request])
        return output

    async def submit_all(
        self, requests: Sequence[PoolingRequest], row_done: RowDone | None = None
    ) -> list[PoolingOutput]:
        """Compute rows; return them in the order of the requests.

        Raises ``EngineLoadingError``, ``EngineDeadError``, or the error of the first row that failed:
        ``BatchFailedError``, or what ``row_done`` raised. Then, and on cancellation, rows that have not been launched
        leave the queue; those that have are computed, and their outputs dropped.
        """
        return await self.complete(Submission(requests, row_done), self.submit_nowait)

    async def complete(self, submission: Submission, submit: Callable[..., object]) -> list[PoolingOutput]:
        """Call ``submit(*entries)``, which submits the entries now or later, and return their outputs.

        Raises and is cancelled as ``submit_all``.
        """
        try:
            submit(*submission.entries)
            return await submission.wait()
        finally:
            submission.row_done = None  # launched rows may still be finished
            for entry in submission.entries:
                self.withdraw(entry)

    @abstractmethod
    def submit_nowait(self, *entries: QueueEntry) -> None:
        """Queue rows; their entries are settled on the loop, maybe at once. Raises as ``submit_all`` when not ready."""

    @abstractmethod
    def withdraw(self, entry: QueueEntry) -> None:
        """Take a row out of the queue; one that has been launched is computed, and its output dropped.

        Should its batch fail, it is not computed again.
        """

    @abstractmethod
    def admit(self, work: EstimatedWork) -> AbstractContextManager[AdmittedRequest]:
        """Admit a request for as long as the context lasts.

        Raises ``OverloadedError`` if it would wait for too long, and as ``submit`` when not ready.
        """

    @abstractmethod
    def refuse_late(self, work: EstimatedWork) -> None:
        """Raise what ``admit`` would raise."""

    @abstractmethod
    def open_scope(self) -> AbstractContextManager[QueryScope]:
        """Open a scope for one request's held queries; they are freed when the context ends.

        Raises as ``submit`` when not ready.
        """

    @property
    @abstractmethod
    def dimensions(self) -> int:
        """Length of the vectors before truncation. Raises as ``submit`` when not ready."""

    @property
    @abstractmethod
    def embeds_width(self) -> int:
        """Width of token embeddings accepted in place of ids; 0 if none are. Raises as ``submit`` when not ready."""

    @property
    @abstractmethod
    def max_batch_tokens(self) -> int:
        """Token budget of a batch. Raises as ``submit`` when not ready."""

    @property
    @abstractmethod
    def cosine_with_float32(self) -> float | None:
        """Agreement of a quantised model with float32, else ``None``. Raises as ``submit`` when not ready."""

    @property
    @abstractmethod
    def probe_request(self) -> PoolingRequest | None:
        """A row of a few tokens that the model can compute; ``None`` if none is known. Raises as ``submit``."""

    @property
    @abstractmethod
    def stall_reason(self) -> str:
        """Why the engine's state is stalled; empty if it is not."""

    @abstractmethod
    def is_overloaded(self, waited_s: float = 0.0) -> bool:
        """Return whether so much waits that a further request, which has waited already, would probably be refused."""

    @abstractmethod
    async def wait_ready(self) -> None:
        """Wait until the model is loaded. Raises ``EngineDeadError`` if the engine has stopped.

        Cancellation: at once.
        """

    @property
    def reported_load(self) -> dict[str, Any]:
        """The engine's part of ``/load``: what no other process of the server reports of it."""
        return {**asdict(self.statistics()), "memory_bytes": self.memory.resident_bytes}

    @property
    @abstractmethod
    def memory(self) -> ModelMemory:
        """The memory of the loaded model, in all processes that compute it."""

    @property
    @abstractmethod
    def state(self) -> EngineState:
        """The engine's state, which ``statistics`` has too."""

    @abstractmethod
    def statistics(self) -> EngineStatistics:
        """Return the engine's state and load."""
