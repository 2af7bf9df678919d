"""The interface of the devices that compute an engine's model."""

from abc import ABC, abstractmethod
from typing import ClassVar

from attrs import define, field

from trio_pool_serve.config import SchedulingConfig
from trio_pool_serve.engine.dispatcher import Dispatcher
from trio_pool_serve.engine.engine_statistics import EngineState, ModelMemory, QueueStatistics
from trio_pool_serve.errors import EngineLoadingError
from trio_pool_serve.types import RunnerFacts


@define(eq=False)
class Devices(ABC):
    """The devices that compute the batches of one dispatcher: a ``Worker`` in this process, or ``RemoteWorkers``."""

    is_local: ClassVar[bool] = False
    """Whether it computes in this process."""
    loading_message: ClassVar[str]
    """Why no rows are taken while it is loading."""
    dispatcher: Dispatcher
    config: SchedulingConfig = field(factory=SchedulingConfig)
    _facts: RunnerFacts | None = field(default=None, init=False)
    """Facts about the loaded model; ``None`` before a device has been ready."""

    @abstractmethod
    async def run(self) -> None:
        """Load or connect, then compute until cancelled; see the classes for errors. Cancellation: at once."""

    @property
    @abstractmethod
    def takes_rows(self) -> bool:
        """Whether a device is ready to compute rows that arrive now."""

    @property
    @abstractmethod
    def stall_reason(self) -> str:
        """Why no batches return; empty if they do."""

    @property
    def state(self) -> EngineState:
        """The state of all devices together."""
        if self.dispatcher.is_closed:
            return "dead"
        if not self.takes_rows:
            return "loading"
        return "stalled" if self.stall_reason else "ready"

    @property
    def facts(self) -> RunnerFacts:
        """Facts about the loaded model. Raises ``EngineLoadingError`` before a device has been ready."""
        if self._facts is None:
            raise EngineLoadingError(self.loading_message)
        return self._facts

    @property
    @abstractmethod
    def memory(self) -> ModelMemory:
        """The memory of the loaded model in all processes, including other machines."""

    @abstractmethod
    def statistics(self) -> QueueStatistics:
        """Return the state and the load, without admitted requests."""

    def free(self) -> None:  # noqa: B027  (the model is in other processes)
        """Release the loaded model, whose engine has ended."""

    def note_admitted(self) -> None:  # noqa: B027  (devices of this process are not shared)
        """Note that a request was admitted."""
