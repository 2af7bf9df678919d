"""The copy of the heads' outputs from the device to the host, without stopping the device.

On CUDA the tensors go to pinned memory on a side stream, and a blocking event is recorded at the end of the copy. The
handle is awaited: a thread sleeps in ``event.synchronize()`` under the ``copy`` limiter while the next batch is
launched. On CPU the rows are on the host when ``launch`` returns.

Two lifetimes matter. The tensors are written on one stream and copied on another, so their memory must not be reused by
the next batch before the copy is done. And the pinned buffer must outlive the copy even if nothing awaits it any more.
The handle keeps both, and so does the waiting thread, which goes on waiting if its task is cancelled. A handle that is
dropped before a thread waits relies on ``protect``, and on torch, which keeps a pinned buffer until the copies into it
are done.
"""

from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from attrs import define, field
from torch import Tensor

from trio_pool_serve.errors import OutOfDeviceMemoryError, RunnerDeadError
from trio_pool_serve.runner.device import use_device
from trio_pool_serve.threads.offload import Offload
from trio_pool_serve.types import PooledBatch, PooledValue


class Event(Protocol):
    """A point on a stream."""

    def record(self, stream: Any) -> None:
        """Record the current end of ``stream``."""

    def synchronize(self) -> None:
        """Block the calling thread until the device has reached the recorded point."""


class CopyBackend(Protocol):
    """Asynchronous copies of one kind of device. Tests implement it on CPU."""

    def use_device(self) -> None:
        """Make the device the calling thread's current one."""

    def open_stream(self) -> Any:
        """Return a new side stream."""

    def wait_for_compute(self, stream: Any) -> None:
        """Make ``stream`` wait for what has been launched on the current stream."""

    def on_stream(self, stream: Any) -> AbstractContextManager[Any]:
        """Return a context in which copies are enqueued on ``stream``."""

    def protect(self, tensor: Tensor, stream: Any) -> None:
        """Keep the memory of ``tensor``, even if freed, from being reused before ``stream`` has read it."""

    def host_buffer(self, like: Tensor) -> Tensor:
        """Return an uninitialised host tensor that the device can write to asynchronously."""

    def blocking_event(self) -> Event:
        """Return a new event whose ``synchronize`` sleeps instead of spinning."""


class CudaCopyBackend:
    """Copies on CUDA."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._cuda: Any = torch.get_device_module(device)

    def use_device(self) -> None:
        """Make the device the calling thread's current one."""
        use_device(self.device)

    def open_stream(self) -> torch.cuda.Stream:
        """Return a new side stream."""
        stream: torch.cuda.Stream = self._cuda.Stream(self.device)
        return stream

    def wait_for_compute(self, stream: torch.cuda.Stream) -> None:
        """Make ``stream`` wait for the current stream."""
        stream.wait_stream(self._cuda.current_stream(self.device))

    def on_stream(self, stream: torch.cuda.Stream) -> AbstractContextManager[Any]:
        """Return a context in which copies are enqueued on ``stream``."""
        context: AbstractContextManager[Any] = self._cuda.stream(stream)
        return context

    def protect(self, tensor: Tensor, stream: torch.cuda.Stream) -> None:
        """Register ``stream`` as a user of the tensor with the allocator."""
        tensor.record_stream(stream)

    def host_buffer(self, like: Tensor) -> Tensor:
        """Return a pinned tensor."""
        return torch.empty(like.shape, dtype=like.dtype, pin_memory=True)

    def blocking_event(self) -> Event:
        """Return a blocking event. Not a ``torch.Event``, which silently ignores the flag."""
        event: Event = self._cuda.Event(blocking=True)
        return event


Split: TypeAlias = Callable[[Sequence[npt.NDArray[np.float32]]], list[tuple[PooledValue, ...]]]
"""Maps arrays, one per copied tensor, to the values of the batch's rows."""


@define(eq=False)
class OutputCopier:
    """Starts copies on one side stream, which is created on first use."""

    backend: CopyBackend
    offload: Offload
    _stream: Any = field(default=None, init=False)

    def start(self, tensors: Sequence[Tensor], split: Split) -> PooledBatch:
        """Enqueue the copies of ``tensors`` (float32, any shape) and return their handle at once.

        ``split`` is called with the copied arrays, in the thread that waits for the copies.
        """
        if self._stream is None:
            self._stream = self.backend.open_stream()
        self.backend.wait_for_compute(self._stream)
        host = [self.backend.host_buffer(tensor) for tensor in tensors]
        event = self.backend.blocking_event()
        with self.backend.on_stream(self._stream):
            for buffer, tensor in zip(host, tensors, strict=True):
                buffer.copy_(tensor, non_blocking=True)
            event.record(self._stream)
        for tensor in tensors:
            self.backend.protect(tensor, self._stream)
        return CopyingBatch(list(tensors), host, event, split, self)


@define(eq=False)
class CopyingBatch:
    """The handle on a batch whose rows are being copied to the host. Can be awaited once.

    Awaiting raises ``RunnerDeadError`` if the device has failed. Cancellation: the awaiting task leaves at once; the
    thread stays until the event has fired, and keeps the device tensors and the host buffers until then.
    """

    _device: list[Tensor]
    _host: list[Tensor]
    _event: Event
    _split: Split
    _copier: OutputCopier

    def __await__(self) -> Generator[Any, Any, list[tuple[PooledValue, ...]]]:
        return self._wait().__await__()

    async def _wait(self) -> list[tuple[PooledValue, ...]]:
        device, self._device = self._device, []
        event, host, split, backend = self._event, self._host, self._split, self._copier.backend

        def wait_for_copy() -> list[tuple[PooledValue, ...]]:
            backend.use_device()
            try:
                event.synchronize()
                device.clear()  # the copies are done
                return split([buffer.numpy() for buffer in host])
            except torch.AcceleratorError as error:  # errors of kernels appear after their launch
                raise RunnerDeadError(f"the device failed: {error}") from error
            except torch.OutOfMemoryError as error:  # of a further copy
                raise OutOfDeviceMemoryError(" ".join(str(error).split())) from None
            finally:
                device.clear()

        return await self._copier.offload.run("copy", wait_for_copy, abandon_on_cancel=True)
