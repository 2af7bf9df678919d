"""CUDA's debug mode for synchronisations: what makes the host wait for the device raises an error."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def synchronisations_refused(device: torch.device) -> Iterator[None]:
    """Have torch raise ``RuntimeError`` for synchronisations within the block, in all threads."""
    cuda: Any = torch.get_device_module(device)
    before = cuda.get_sync_debug_mode()
    cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        cuda.set_sync_debug_mode(before)
