"""The copy of the heads' outputs from the device to the host, without stopping the device.

On CUDA the tensors go to pinned memory on a side stream, and a blocking event is recorded at the end of the copy. The
handle is awaited: a thread sleeps in ``event.synchronize()`` under the ``copy`` limiter while the next batch is
launched. On CPU the rows are on the host when ``launch`` returns.

Two lifetimes matter. The tensors are written on one stream and copied on another, so their memory must not be reused by
the next batch before the copy is done. And the pinned buffer must outlive the copy even if nothing awaits it any more.
The handle keeps both, and so does the waiting thread, which goes on waiting if its task is cancelled. A handle that is
dropped before a thread waits relies on ``record_stream``, and on torch, which keeps a pinned buffer until the copies
into it are done.
"""

from collections.abc import Callable, Generator, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from attrs import define, field
from torch import Tensor

from trio_pool_serve.errors import OutOfDeviceMemoryError, RunnerDeadError
from trio_pool_serve.runner.torch_device import use_device
from trio_pool_serve.threads.offload import Offload
from trio_pool_serve.types import PooledBatch, PooledValue

Split: TypeAlias = Callable[[Sequence[npt.NDArray[np.float32]]], list[tuple[PooledValue, ...]]]
"""Maps arrays, one per copied tensor, to the values of the batch's rows."""


@define(eq=False)
class OutputCopier:
    """Starts copies on one side stream of a GPU, which is created on first use."""

    device: torch.device
    offload: Offload
    _stream: Any = field(default=None, init=False)

    def start(self, tensors: Sequence[Tensor], split: Split) -> PooledBatch:
        """Enqueue the copies of ``tensors`` (float32, any shape) and return their handle at once.

        ``split`` is called with the copied arrays, in the thread that waits for the copies.
        """
        cuda: Any = torch.get_device_module(self.device)
        if self._stream is None:
            self._stream = cuda.Stream(self.device)
        # The copies wait for the heads of this batch, and for nothing that is enqueued later.
        self._stream.wait_stream(cuda.current_stream(self.device))
        # A copy to memory that is not pinned would make the launching thread wait for the device.
        host = [torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True) for tensor in tensors]
        event = cuda.Event(blocking=True)  # sleeps instead of spinning; a ``torch.Event`` silently ignores the flag
        with cuda.stream(self._stream):
            for buffer, tensor in zip(host, tensors, strict=True):
                buffer.copy_(tensor, non_blocking=True)
            event.record(self._stream)
        # Also for a handle that is dropped at once: its tensors' memory is reused only after the copies.
        for tensor in tensors:
            tensor.record_stream(self._stream)
        return CopyingBatch(list(tensors), host, event, split, self)


@define(eq=False)
class CopyingBatch:
    """The handle on a batch whose rows are being copied to the host. Can be awaited once.

    Awaiting raises ``RunnerDeadError`` if the device has failed. Cancellation: the awaiting task leaves at once; the
    thread stays until the event has fired, and keeps the device tensors and the host buffers until then.
    """

    _device: list[Tensor]
    _host: list[Tensor]
    _event: Any
    _split: Split
    _copier: OutputCopier

    def __await__(self) -> Generator[Any, Any, list[tuple[PooledValue, ...]]]:
        return self._copier.offload.run("copy", self._wait_for_copy, abandon_on_cancel=True).__await__()

    def _wait_for_copy(self) -> list[tuple[PooledValue, ...]]:
        use_device(self._copier.device)  # each thread has a current device of its own
        try:
            self._event.synchronize()
            self._device.clear()  # the copies are done, and the next batch may need this memory during the split
            return self._split([buffer.numpy() for buffer in self._host])
        except torch.AcceleratorError as error:  # errors of kernels appear after their launch
            raise RunnerDeadError(f"the device failed: {error}") from error
        except torch.OutOfMemoryError as error:  # of a further copy
            raise OutOfDeviceMemoryError(" ".join(str(error).split())) from None
        finally:
            # A handle or a traceback that is kept must not keep the batch's memory on the device.
            self._device.clear()
