"""The memory that a model takes: by how much the process has grown while it was loaded."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from attrs import define

from trio_pool_serve.processes.allocator import return_freed_memory
from trio_pool_serve.telemetry.gauges import Gauges
from trio_pool_serve.telemetry.process_usage import resident_bytes


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
