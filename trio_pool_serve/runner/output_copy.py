"""Pooled rows from the device to the host, without stopping the device.

On CUDA the rows go to pinned memory on a side stream, and a blocking event marks the end of the copy.
Whoever wants the rows awaits the handle: a thread sleeps in ``event.synchronize()`` under the ``copy``
limiter while the next batch is launched. Elsewhere the rows are on the host when ``launch`` returns.

Two lifetimes matter. The rows are computed on one stream and read on another, so they must not be freed
— and their memory handed to the next batch — before the copy has read them. And the pinned buffer must
outlive the copy even if nobody waits for it any more. The handle keeps both, and so does the thread that
waits, which goes on waiting if its waiter is cancelled. A handle that is dropped before any thread waits
relies on ``protect``, and on torch, which keeps a pinned buffer until the copies into it are done.
"""

from collections.abc import Generator
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from attrs import define, field
from torch import Tensor

from trio_pool_serve.errors import RunnerDeadError
from trio_pool_serve.offload import Offload
from trio_pool_serve.types import PooledBatch, Vectors


class Event(Protocol):
    """Marks a point on a stream."""

    def record(self, stream: Any) -> None:
        """Mark the current end of ``stream``."""

    def synchronize(self) -> None:
        """Block the calling thread until the device has reached the mark."""


class CopyBackend(Protocol):
    """What a device must offer for asynchronous copies. Tests implement it on the processor."""

    def open_stream(self) -> Any:
        """Return a new side stream."""

    def wait_for_compute(self, stream: Any) -> None:
        """Have ``stream`` wait for what has been launched on the current stream."""

    def on_stream(self, stream: Any) -> AbstractContextManager[Any]:
        """Return a context in which copies go to ``stream``."""

    def protect(self, rows: Tensor, stream: Any) -> None:
        """Keep the memory of ``rows`` from being reused before ``stream`` has read it, though they be freed."""

    def host_buffer(self, like: Tensor) -> Tensor:
        """Return an uninitialised host tensor that the device can write to by itself."""

    def blocking_event(self) -> Event:
        """Return a new event whose ``synchronize`` sleeps instead of spinning."""


class CudaCopyBackend:
    """The real one."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def open_stream(self) -> torch.cuda.Stream:
        """Return a new side stream."""
        return torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]

    def wait_for_compute(self, stream: torch.cuda.Stream) -> None:
        """Have ``stream`` wait for the current stream."""
        stream.wait_stream(torch.cuda.current_stream(self.device))

    def on_stream(self, stream: torch.cuda.Stream) -> AbstractContextManager[Any]:
        """Return a context in which copies go to ``stream``."""
        return torch.cuda.stream(stream)

    def protect(self, rows: Tensor, stream: torch.cuda.Stream) -> None:
        """Tell the allocator that ``stream`` uses the rows too."""
        rows.record_stream(stream)

    def host_buffer(self, like: Tensor) -> Tensor:
        """Return a pinned tensor."""
        return torch.empty(like.shape, dtype=like.dtype, pin_memory=True)

    def blocking_event(self) -> Event:
        """Return a blocking event; ``torch.Event`` would silently ignore the flag."""
        return torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]


@define(eq=False)
class OutputCopier:
    """Starts copies on one side stream, made on first use."""

    backend: CopyBackend
    offload: Offload
    _stream: Any = field(default=None, init=False)

    def start(self, rows: Tensor, dimensions: list[int]) -> PooledBatch:
        """Enqueue the copy of ``rows`` [rows, d] and return its handle at once."""
        if self._stream is None:
            self._stream = self.backend.open_stream()
        self.backend.wait_for_compute(self._stream)
        host = self.backend.host_buffer(rows)
        event = self.backend.blocking_event()
        with self.backend.on_stream(self._stream):
            host.copy_(rows, non_blocking=True)
            event.record(self._stream)
        self.backend.protect(rows, self._stream)
        return CopyingBatch(rows, host, event, dimensions, self.offload)


@define(eq=False)
class CopyingBatch:
    """Rows on their way to the host. Can be awaited once.

    Raises ``RunnerDeadError`` if the device has failed by then. Cancellation: the waiter leaves at once;
    its thread stays until the event has fired and keeps the device's rows and the host buffer until then.
    """

    _device_rows: Tensor | None
    _host_rows: Tensor
    _event: Event
    _dimensions: list[int]
    _offload: Offload

    def __await__(self) -> Generator[Any, Any, list[Vectors]]:
        return self._wait().__await__()

    async def _wait(self) -> list[Vectors]:
        device_rows, self._device_rows = self._device_rows, None
        event, host_rows = self._event, self._host_rows

        def wait_for_copy(held: list[Tensor | None]) -> None:
            try:
                event.synchronize()
            except torch.AcceleratorError as error:  # kernels fail after they have been launched
                raise RunnerDeadError(f"the device failed: {error}") from error
            finally:
                held.clear()  # the device and the copy are done with them

        held = [device_rows, host_rows]
        del device_rows
        await self._offload.run("copy", lambda: wait_for_copy(held), abandon_on_cancel=True)
        return split_rows(host_rows, self._dimensions)


def split_rows(rows: Tensor, dimensions: list[int]) -> list[Vectors]:
    """Return the rows of a host tensor [rows, d] one by one, each cut to its own dimensions."""
    array = rows.numpy()
    return [row[:length] for row, length in zip(array, dimensions, strict=True)]
