"""Errors that mean that a device's memory does not suffice, as torch, OpenVINO and C++ libraries raise them."""

from typing import Any

MESSAGES = (
    "defaultcpuallocator:",  # torch on CPU: a RuntimeError
    "cuda error: out of memory",  # an AcceleratorError, of pinned memory; it leaves the context usable
    "cuda driver error: out of memory",  # of memory that is mapped piece by piece (expandable segments)
    "cublas_status_alloc_failed",  # of a thread's first multiplication
    "std::bad_alloc",  # oneDNN and OpenVINO
    "failed to allocate",  # OpenVINO: "Failed to allocate 6400000000 bytes of memory"
    "cannot allocate memory",  # of the C library
)
"""Parts of messages in lower case, for errors that have no type of their own."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error, or one that led to it, means that memory did not suffice."""
    seen: BaseException | None = error
    while seen is not None:
        if any(
            kind.__name__ in ("MemoryError", "OutOfMemoryError") for kind in type(seen).__mro__
        ):  # Python's, torch's
            return True
        if isinstance(seen, RuntimeError) and any(message in str(seen).lower() for message in MESSAGES):
            return True
        seen = seen.__cause__ or seen.__context__  # a capture that ends because of it raises an error of its own
    return False


def release_caches(device: Any) -> None:
    """Return memory that torch keeps for later to its device. Blocks until the device has computed what it has."""
    if device.type != "cpu":
        import torch  # imported here: a model that OpenVINO computes needs none

        torch.get_device_module(device).empty_cache()
