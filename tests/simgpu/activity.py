"""What the simulated GPU was asked to do, and what was wrong with it."""

import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import RLock

import torch
from attrs import define, field

LOCK = RLock()
"""Held while the device's state is read or changed: several threads launch, copy and free."""

OUTSIDE = (str(Path(torch.__file__).parent), str(Path(__file__).parent), "<")
"""Files whose frames do not tell where a call comes from."""


class SimulatedFaultError(Exception):
    """The device was used in a way that waits, races or fails on a real one."""


def call_site() -> str:
    """Return file and line of the innermost caller outside torch and the simulator."""
    for frame in reversed(traceback.extract_stack()):
        if not frame.filename.startswith(OUTSIDE) and "/attr/" not in frame.filename:
            return f"{'/'.join(Path(frame.filename).parts[-3:])}:{frame.lineno}"
    return "?"


@define(eq=False)
class Activity:
    """Counts since it was opened; lists name the place in the code."""

    kernels: Counter[str] = field(factory=Counter)
    """By operation: what takes at least one kernel on CUDA. A replayed graph is one."""
    attentions: list[tuple[str, tuple[int, ...]]] = field(factory=list)
    """Function and shape of the query of each attention."""
    masks: list[tuple[int, ...] | None] = field(factory=list)
    """Shapes of the masks of attentions in padded rows."""
    cudnn_plans: set[tuple[int, ...]] = field(factory=set)
    """Shapes that cuDNN would have made a plan for."""
    blocking_copies: list[str] = field(factory=list)
    """Copies for which the host waits: from or to pageable memory, or not ``non_blocking``."""
    synchronisations: list[str] = field(factory=list)
    """Reads of the device's values by the host, streams and devices waited for, events aside."""
    races: list[str] = field(factory=list)
    """Accesses that no event orders, and memory freed while another stream uses it."""
    to_device_bytes: int = 0
    to_host_bytes: int = 0
    copies_to_device: int = 0
    copies_to_host: int = 0

    @property
    def launches(self) -> int:
        """Kernels and copies."""
        return self.kernels.total() + self.copies_to_device + self.copies_to_host

    def require_asynchronous(self) -> None:
        """Raise ``SimulatedFaultError`` if the host has waited for the device, or accesses are not ordered."""
        found = [
            *(f"blocking copy: {site}" for site in self.blocking_copies),
            *(f"synchronisation: {site}" for site in self.synchronisations),
            *(f"race: {race}" for race in self.races),
        ]
        if found:
            raise SimulatedFaultError("\n".join(found))


_open: list[Activity] = []


@contextmanager
def watched() -> Iterator[Activity]:
    """Record what the device is asked to do by any thread within the block."""
    activity = Activity()
    with LOCK:
        _open.append(activity)
    try:
        yield activity
    finally:
        with LOCK:
            _open.remove(activity)


def activities() -> list[Activity]:
    """Return those that are open."""
    return list(_open)
