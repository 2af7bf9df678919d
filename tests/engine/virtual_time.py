"""The engine by Trio's clock, which a test may move."""

from types import SimpleNamespace

import pytest
import trio

from trio_pool_serve.engine import device, dispatcher, local_device, queue_entry, scheduler
from trio_pool_serve.engine.remote import device_server, remote_device

TIMED = (*(device, device_server, dispatcher), *(local_device, queue_entry, remote_device, scheduler))
"""Modules that read ``time.perf_counter``."""


def patch_time(patch: pytest.MonkeyPatch) -> None:
    """Make the engine read Trio's clock."""
    for module in TIMED:
        patch.setattr(module, "time", SimpleNamespace(perf_counter=trio.current_time))
