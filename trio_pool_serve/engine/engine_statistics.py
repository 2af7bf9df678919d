"""The state, the load and the memory of an engine."""

import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Literal, TypeAlias, get_args

from attrs import define, frozen

from trio_pool_serve.processes.allocator import allocated_bytes, resident_bytes, return_freed_memory
from trio_pool_serve.telemetry.gauges import Gauges

EngineState: TypeAlias = Literal["loading", "ready", "stalled", "dead"]
"""stalled: ready, but no batches return: a row submitted now may wait for long."""

ENGINE_STATES: tuple[EngineState, ...] = get_args(EngineState)


@frozen
class QueueStatistics:
    """The state of an engine at one moment, and the rows that wait for it in this process."""

    state: EngineState
    queued_rows: int
    queued_tokens: int
    admitted_tokens: int = 0
    """Tokens of admitted requests that are not computed; estimated for requests that are not rendered."""
    waiting_s: float = 0.0
    """Seconds that all admitted work will take, at the measured rates; 0 before the first batch."""

    def gauges(self) -> dict[str, dict[str, float]]:
        """Return the values of the engine's metrics."""
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
    """The state of an engine whose replicas are other processes, which report their own load."""

    replicas: Mapping[str, Mapping[str, EngineState]]
    """The states of stalled replicas, by number: a silent replica cannot report it."""


@frozen(kw_only=True)
class EngineStatistics(QueueStatistics):
    """The state and load of an engine at one moment, in the process that computes."""

    in_flight_batches: int
    oldest_in_flight_s: float
    """Seconds since the launch of the oldest batch in flight; 0 if there is none."""
    tokens_per_s: float = 0.0
    """Tokens computed per second, as a moving average; 0 before the first batch."""
    batches: int = 0
    failed_batches: int = 0
    batch_token_budget: int = 0
    """The current token budget of a batch: below the configured one after the device ran out of memory."""
    memory_bytes: int
    """Resident memory of the model."""

    def gauges(self) -> dict[str, dict[str, float]]:
        """Return the values of the engine's metrics."""
        return {
            "engine": {
                **super().gauges()["engine"],
                "ready": float(self.state == "ready"),
                "stalled": float(self.state == "stalled"),
                "in_flight_batches": self.in_flight_batches,
                "oldest_in_flight_seconds": self.oldest_in_flight_s,
                "batch_token_budget": self.batch_token_budget,
            }
        }


@define
class ModelMemory:
    """Memory of a model in the processes that compute it, in bytes; 0 until it is loaded, and if it is not measured."""

    resident_bytes: int = 0
    """Resident memory, including mapped files."""
    device_bytes: int = 0
    """Tensors in GPU memory."""
    loading_s: float = 0.0
    """Seconds that loading took, without waiting for other models."""

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Add the growth of the process during the block, or of its allocated memory, if that has grown more.

        Memory that others allocate meanwhile counts too, as do libraries that are imported for the first time.
        """
        return_freed_memory()
        began, resident, allocated = time.perf_counter(), resident_bytes(), allocated_bytes()
        device = _device_bytes()
        yield
        self.loading_s += time.perf_counter() - began
        return_freed_memory()
        growth = max(resident_bytes() - resident, allocated_bytes() - allocated)
        self.resident_bytes = max(0, self.resident_bytes + growth)
        self.device_bytes = max(0, self.device_bytes + _device_bytes() - device)

    def gauges(self) -> Gauges:
        """Return the values of the model's metrics."""
        return {"model_memory_bytes": {"resident": self.resident_bytes, "device": self.device_bytes}}


def _device_bytes() -> int:
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return 0
    return sum(torch.cuda.memory_allocated(device) for device in range(torch.cuda.device_count()))
