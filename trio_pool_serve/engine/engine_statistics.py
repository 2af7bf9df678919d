"""The state, the load and the memory of an engine."""

import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Literal, TypeAlias, get_args

from attrs import define, frozen

from trio_pool_serve.processes.allocator import return_freed_memory
from trio_pool_serve.telemetry.gauges import Gauges
from trio_pool_serve.telemetry.process_usage import resident_bytes

EngineState: TypeAlias = Literal["loading", "ready", "stalled", "dead"]
"""stalled: ready, but nothing comes back: a row that is submitted now may wait for long."""

ENGINE_STATES: tuple[EngineState, ...] = get_args(EngineState)


@frozen
class QueueStatistics:
    """The state of an engine at one moment, and what waits for it in this process."""

    state: EngineState
    queued_rows: int
    queued_tokens: int
    admitted_tokens: int = 0
    """Tokens of the requests that are admitted and not computed; an estimate for those that are not rendered."""
    waiting_s: float = 0.0
    """Seconds that all admitted work will take, at the measured rates; 0 before the first batch."""

    def gauges(self) -> dict[str, dict[str, float]]:
        """Return what the engine's metrics have of it."""
        return {
            "engine": {
                "queued_rows": self.queued_rows,
                "queued_tokens": self.queued_tokens,
                "admitted_tokens": self.admitted_tokens,
                "waiting_seconds": self.waiting_s,
            }
        }


@frozen(kw_only=True)
class LinkStatistics(QueueStatistics):
    """The state of an engine that is computed in other processes, which report their load themselves."""

    replicas: Mapping[str, Mapping[str, EngineState]]
    """The states of stalled replicas, by number: they cannot report that they are silent."""


@frozen(kw_only=True)
class EngineStatistics(QueueStatistics):
    """The state and the load of an engine at one moment, in the process that computes."""

    in_flight_batches: int
    oldest_in_flight_s: float
    """Seconds since the oldest launched batch was launched; 0 with none in flight."""
    tokens_per_s: float
    """Tokens computed per second, as a moving average; 0 before the first batch."""
    batches: int
    failed_batches: int
    batch_token_budget: int
    """The current token budget of a batch: less than configured after the device ran out of memory; 0 if unknown."""
    memory_bytes: int
    """Resident memory that the model takes."""

    def gauges(self) -> dict[str, dict[str, float]]:
        """Return what the engine's metrics have of it."""
        device = {
            "ready": float(self.state == "ready"),
            "stalled": float(self.state == "stalled"),
            "in_flight_batches": self.in_flight_batches,
            "oldest_in_flight_seconds": self.oldest_in_flight_s,
            "batch_token_budget": self.batch_token_budget,
        }
        return {"engine": super().gauges()["engine"] | device}


@define
class ModelMemory:
    """Bytes that a model takes in the processes that compute it; 0 until it is loaded, and where it is not measured."""

    resident_bytes: int = 0
    """Of the process's resident memory, files that are mapped included."""
    device_bytes: int = 0
    """Of a GPU's memory: tensors."""
    loading_s: float = 0.0
    """Seconds that loading took, without the time in which it waited for other models."""

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Add by how much the process grows in the block.

        What others allocate meanwhile counts, too, as do libraries that are imported for the first time.
        """
        return_freed_memory()
        began, resident, device = time.perf_counter(), resident_bytes(), _device_bytes()
        yield
        self.loading_s += time.perf_counter() - began
        return_freed_memory()
        self.resident_bytes = max(0, self.resident_bytes + resident_bytes() - resident)
        self.device_bytes = max(0, self.device_bytes + _device_bytes() - device)

    def gauges(self) -> Gauges:
        """Return what its metrics have."""
        return {"model_memory_bytes": {"resident": self.resident_bytes, "device": self.device_bytes}}


def _device_bytes() -> int:
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return 0
    return sum(torch.cuda.memory_allocated(device) for device in range(torch.cuda.device_count()))
