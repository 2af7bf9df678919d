"""The device and the dtype that a model is computed on and in, and copies to the device without waiting for it."""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trio_pool_serve.config import Dtype
from trio_pool_serve.errors import require
from trio_pool_serve.runner.cpu_features import dtype_on_cpu


def resolve_device(name: str) -> torch.device:
    """Return the device for ``--device``; raises ``ModelLoadError`` if it does not exist."""
    if name == "auto":
        return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    device = torch.device(name)
    if device.type == "cpu":
        return device
    device = torch.device(device.type, device.index or 0)  # a current device cannot be set without a number
    require(
        device.index < torch.cuda.device_count(),
        f"--device {name}: {torch.cuda.device_count()} CUDA devices are usable here.",
    )
    return device


def resolve_dtype(name: Dtype, device: torch.device) -> torch.dtype:
    """Return the dtype to load weights in for ``--dtype``; for int8 and fp8 they are quantised after loading.

    ``auto`` is bfloat16 where the hardware computes it natively, as NVIDIA Ampere and later do, else float32. On CPU
    so is float16. Raises ``ModelLoadError`` if the device does not compute fp8.
    """
    if name == "fp8" and device.type != "cpu":
        found = torch.get_device_module(device).get_device_capability(device)
        require(
            found >= (8, 9),  # for less, torch has no products in FP8
            f"--dtype fp8 is for GPUs with compute capability 8.9 or higher; {device} has {found[0]}.{found[1]}. "
            "Accepted there: auto, float32, bfloat16, float16.",
        )
        return torch.bfloat16
    if name == "auto" and device.type == "cuda":
        return torch.bfloat16 if torch.cuda.get_device_capability(device) >= (8, 0) else torch.float32
    if name == "float16" and device.type == "cuda":
        return torch.float16
    dtype: torch.dtype = getattr(torch, dtype_on_cpu(name))
    return dtype


def use_device(device: torch.device) -> None:
    """Make a GPU the calling thread's current device, as which CUDA takes the first one in each new thread.

    A thread that only waits for an event of another GPU would give the first one a context, of hundreds of MB.
    """
    if device.type != "cpu":
        torch.get_device_module(device).set_device(device)


def release_caches(device: torch.device) -> None:
    """Return memory that torch keeps for later to its device. Blocks until the device is idle."""
    if device.type != "cpu":
        torch.get_device_module(device).empty_cache()


def limit_memory(device: torch.device, share: Callable[[Callable[[], int]], int]) -> str:
    """Limit this process, once it has loaded its weights, to its share of a GPU's memory; return words for the log.

    torch then reports that memory does not suffice, as if the GPU were smaller. Blocks as ``share`` does.
    """
    release_caches(device)
    cuda = torch.get_device_module(device)
    ours = share(lambda: cuda.mem_get_info(device)[0])
    most = (cuda.memory_reserved(device) + ours) / cuda.mem_get_info(device)[1]
    cuda.set_per_process_memory_fraction(min(1.0, most), device)
    return f"{ours / 2**30:.1f} GiB of the GPU's memory beside the weights"


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
