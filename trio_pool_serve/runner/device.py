"""The device and the dtype that a model is computed on and in."""

import torch

from trio_pool_serve.config import Dtype
from trio_pool_serve.errors import ModelLoadError


def resolve_device(name: str) -> torch.device:
    """Return the device for ``--device``; raises ``ModelLoadError`` if it does not exist or is not supported."""
    if name == "auto":
        return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ModelLoadError(f"--device {name}: no such kind of device.") from error
    if device.type not in ("cpu", "cuda"):
        raise ModelLoadError(f"--device {name}: only cpu and cuda are supported.")
    if device.type == "cpu":
        return device
    device = torch.device(device.type, device.index or 0)  # a current device cannot be set without a number
    if device.index >= torch.cuda.device_count():
        raise ModelLoadError(f"--device {name}: {torch.cuda.device_count()} CUDA devices are usable here.")
    return device


def resolve_dtype(name: Dtype, device: torch.device) -> torch.dtype:
    """Return the dtype to load weights in for ``--dtype``; for int8 they are quantised after loading.

    ``auto`` is bfloat16 where the hardware computes it natively, else float32.
    """
    if name == "int8":
        return torch.float32
    if name != "auto":
        dtype = getattr(torch, name)
        assert isinstance(dtype, torch.dtype)  # noqa: S101  (the setting's validator knows the names)
        return dtype
    return torch.bfloat16 if has_native_bfloat16(device) else torch.float32


def use_device(device: torch.device) -> None:
    """Make a GPU the calling thread's current device, as which CUDA takes the first one in each new thread.

    A thread that only waits for an event of another GPU would give the first one a context, of hundreds of MB.
    """
    if device.type != "cpu":
        torch.get_device_module(device).set_device(device)


def saturates_int8() -> bool:
    """Return whether sums of products of int8 overflow on this CPU: without VNNI, in pairs, at 16 bits."""
    return not torch.cpu._is_vnni_supported()  # noqa: SLF001


def has_native_bfloat16(device: torch.device) -> bool:
    """Return whether the hardware multiplies bfloat16 natively: NVIDIA Ampere or later, AVX512-BF16, AMX."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())  # noqa: SLF001
