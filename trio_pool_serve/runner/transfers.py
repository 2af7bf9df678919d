"""Copies from the host to the device for which the host does not wait."""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


def host_buffer(size: int, device: torch.device) -> Tensor:
    """Return ``size`` uninitialised bytes on the host that can be copied to the device asynchronously.

    Pinned if the device is a GPU. torch reuses pinned memory for later buffers, but only once all copies from it are
    done, so batches in flight never share a buffer.
    """
    return torch.empty(size, dtype=torch.uint8, pin_memory=device.type != "cpu")


def to_device(array: npt.NDArray[np.generic], device: torch.device) -> Tensor:
    """Return an array as a tensor on the device, copied asynchronously; uint16 arrays hold bfloat16."""
    tensor = torch.from_numpy(array)
    if array.dtype == np.uint16:
        tensor = tensor.view(torch.bfloat16)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)
