"""Streams and events of the simulated device, and the order that they put accesses in."""

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import torch
from attrs import define, field
from torch.cuda import _sanitizer

from tests.simgpu.activity import LOCK, activities, call_site

NO_STACKS = SimpleNamespace(
    StackSummary=SimpleNamespace(extract=lambda *stack, **options: []), walk_stack=lambda frame: ()
)
"""In place of the module by which the sanitizer reads a stack for each kernel, which takes a hundred times as long as
all the rest."""

_numbers = itertools.count(1)
_current = threading.local()


@define(eq=False)
class Order:
    """The sanitizer's record of accesses, and the copies to the host that are not done yet."""

    handler: _sanitizer.EventHandler = field(factory=_sanitizer.EventHandler)
    pending: list[tuple[int, int, Callable[[], object]]] = field(factory=list)
    """(stream, sequence number, what writes to the host's memory)."""

    def reset(self) -> None:
        """Forget everything."""
        self.handler = _sanitizer.EventHandler()
        self.pending.clear()

    def launch(self, name: str, reads: set[int], writes: set[int]) -> int:
        """Note a kernel or copy on the current stream; return its sequence number."""
        stream = current_stream().number
        aliases = {pointer: [] for pointer in reads | writes}  # type: ignore[var-annotated]
        found = self.handler._handle_kernel_launch(stream, reads - writes, writes, writes, name, aliases)
        for activity in activities():
            activity.races += [f"{name}: {call_site()}: {type(error).__name__}" for error in found]
        return self.handler.seq_num

    def is_done(self, by_stream: int, stream: int, seq: int) -> bool:
        """Return whether the host or a stream is ordered after an access."""
        syncs = self.handler.syncs
        return seq <= syncs.host_sync_state.get(stream, -1) or syncs.is_ordered_after(by_stream, seq, stream)

    def complete(self) -> None:
        """Do the copies to the host that the host has waited for."""
        done = self.handler.syncs.host_sync_state
        for entry in list(self.pending):
            stream, seq, copy = entry
            if seq <= done.get(stream, -1):
                self.pending.remove(entry)
                copy()


ORDER = Order()


class Stream:
    """As ``torch.cuda.Stream``."""

    def __init__(self, _: object = None, number: int | None = None) -> None:
        with LOCK:
            self.number = next(_numbers) if number is None else number
            ORDER.handler._handle_stream_creation(self.number)

    def wait_stream(self, other: "Stream") -> None:
        """Order what follows on this stream after what is on ``other``."""
        self.wait_event(other.record_event())

    def wait_event(self, event: "Event") -> None:
        """Order what follows after the event."""
        with LOCK:
            ORDER.handler._handle_event_wait(event.number, self.number)

    def record_event(self, event: "Event | None" = None) -> "Event":
        """Record an event at the current end."""
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        """Wait for everything on this stream."""
        with LOCK:
            for activity in activities():
                activity.synchronisations.append(f"stream.synchronize: {call_site()}")
            ORDER.handler._handle_stream_synchronization(self.number)
            ORDER.complete()


class Event:
    """As ``torch.cuda.Event``. Waiting for it is the one way to wait that is no fault."""

    def __init__(self, *, enable_timing: bool = False, blocking: bool = False) -> None:
        self.blocking = blocking
        self.device = current_device()
        with LOCK:
            self.number = next(_numbers)
            ORDER.handler._handle_event_creation(self.number)

    def record(self, stream: Stream | None = None) -> None:
        """Record the current end of a stream."""
        with LOCK:
            ORDER.handler._handle_event_record(self.number, (stream or current_stream()).number)

    def synchronize(self) -> None:
        """Wait for what was on the stream when the event was recorded."""
        with LOCK:
            if current_device() != self.device:
                for activity in activities():
                    activity.races.append(f"a thread of device {current_device()} waits for device {self.device}")
            ORDER.handler._handle_event_synchronization(self.number)
            ORDER.complete()


def current_device() -> int:
    """Return this thread's device."""
    found: int = getattr(_current, "device", 0)
    return found


def set_device(device: object) -> None:
    """Set this thread's device. Raises ``ValueError`` for one without a number, as torch does."""
    index = torch.device(device).index  # type: ignore[call-overload]
    if index is None:
        raise ValueError(f"Expected a torch.device with a specified index, but got {device}")
    _current.device = index


DEFAULT_STREAM = Stream(number=0)


def current_stream(_: object = None) -> Stream:
    """Return this thread's current stream."""
    found: Stream = getattr(_current, "stream", DEFAULT_STREAM)
    return found


@contextmanager
def stream(entered: Stream) -> Iterator[None]:
    """Make a stream this thread's current one within the block."""
    before = current_stream()
    _current.stream = entered
    try:
        yield
    finally:
        _current.stream = before


def synchronize(_: object = None) -> None:
    """Wait for all streams."""
    with LOCK:
        for activity in activities():
            activity.synchronisations.append(f"synchronize: {call_site()}")
        ORDER.handler._handle_device_synchronization()
        ORDER.complete()
