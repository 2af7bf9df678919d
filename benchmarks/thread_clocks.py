"""CPU time and waiting of the threads of a process and its children, from Linux's ``/proc``."""

import ctypes
import os
import random
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from pathlib import Path

import psutil
import trio
from attrs import define, field, frozen

PROC = Path("/proc")

FUTEX = b"202" if os.uname().machine == "x86_64" else b"98"
"""The number of the system call that waits for locks."""

Thread = tuple[int, int]
"""A process and a thread of it."""


@frozen
class Clock:
    """Seconds of a thread: running on a core, and ready to run but waiting for one."""

    cpu_s: float
    core_wait_s: float

    @property
    def ready_s(self) -> float:
        """Seconds that it did not sleep."""
        return self.cpu_s + self.core_wait_s

    def __sub__(self, other: "Clock") -> "Clock":
        return Clock(self.cpu_s - other.cpu_s, self.core_wait_s - other.core_wait_s)

    def __add__(self, other: "Clock") -> "Clock":
        return Clock(self.cpu_s + other.cpu_s, self.core_wait_s + other.core_wait_s)


ZERO = Clock(0.0, 0.0)


def process_tree(pid: int) -> list[int]:
    """Return a process and all its descendants."""
    found = [pid]
    for parent in found:
        with suppress(FileNotFoundError, ProcessLookupError):
            for children in PROC.glob(f"{parent}/task/*/children"):
                found += map(int, children.read_text().split())
    return found


def server_process(port: int) -> int:
    """Return the child of this process that was started with ``--port port``."""
    for pid in process_tree(os.getpid())[1:]:
        with suppress(FileNotFoundError, ProcessLookupError):
            if f"\0--port\0{port}\0" in (PROC / str(pid) / "cmdline").read_text():
                return pid
    raise ProcessLookupError(f"no server with --port {port}")


def listening_process(port: int) -> int:
    """Return the process of this machine that listens on a TCP port; 0 if none does that this user can see."""
    for connection in psutil.net_connections("tcp"):
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port and connection.pid:
            return connection.pid
    return 0


def read_clocks(pid: int) -> dict[Thread, Clock]:
    """Return the clock of every thread of a process and its descendants, by process and thread."""
    return {(owner, thread): clock for owner, thread, clock in _clocks(pid)}


def _clocks(pid: int) -> Iterator[tuple[int, int, Clock]]:
    for owner in process_tree(pid):
        for folder in PROC.glob(f"{owner}/task/*"):
            with suppress(FileNotFoundError, ProcessLookupError):
                running_ns, waiting_ns, _ = (folder / "schedstat").read_text().split()
                yield owner, int(folder.name), Clock(int(running_ns) / 1e9, int(waiting_ns) / 1e9)


def clocks_since(before: dict[Thread, Clock], pid: int) -> dict[Thread, Clock]:
    """Return what each clock has advanced by. Threads that have ended meanwhile are missing."""
    return {thread: clock - before.get(thread, ZERO) for thread, clock in read_clocks(pid).items()}


def thread_name(owner: int, thread: int) -> str:
    """Return what Linux calls a thread; empty if it has ended."""
    with suppress(FileNotFoundError, ProcessLookupError):
        return (PROC / str(owner) / "task" / str(thread) / "comm").read_text().strip()
    return ""


class _Symbol(ctypes.Structure):
    """``Elf64_Sym``."""

    _fields_ = (
        ("name", ctypes.c_uint32),
        ("kind", ctypes.c_uint16),
        ("section", ctypes.c_uint16),
        ("value", ctypes.c_uint64),
        ("size", ctypes.c_uint64),
    )


class _Place(ctypes.Structure):
    """``Dl_info``."""

    _fields_ = (
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("symbol", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    )


@frozen
class InterpreterState:
    """Where the interpreter keeps its global state, the lock among it, in the file that it was loaded from."""

    file: str
    offset: int
    size: int

    @classmethod
    def find(cls) -> "InterpreterState":
        """Look into this process; others that run the same Python have it in the same place of the same file."""
        runtime = ctypes.c_char.in_dll(ctypes.pythonapi, "_PyRuntime")
        place, symbol = _Place(), ctypes.POINTER(_Symbol)()
        if not ctypes.CDLL(None).dladdr1(ctypes.byref(runtime), ctypes.byref(place), ctypes.byref(symbol), 1):
            raise LookupError("the interpreter's state is not found")
        file = Path(os.fsdecode(place.file))
        file = file if file.exists() else Path(sys.executable)  # the executable's is its bare name
        return cls(str(file.resolve()), ctypes.addressof(runtime) - place.base, symbol.contents.size)

    def addresses(self, pid: int) -> range:
        """Return where it is in another process; empty if that runs another Python."""
        for line in (PROC / str(pid) / "maps").read_text().splitlines():
            span, _, offset, _, _, *path = line.split(maxsplit=5)
            if path == [self.file] and not int(offset, 16):
                start = int(span.partition("-")[0], 16) + self.offset
                return range(start, start + self.size)
        return range(0)


@define
class Waits:
    """How often each thread was found waiting for the interpreter lock; filled during a ``watch_lock``."""

    looks: int = 0
    seconds: float = 0.0
    waiting: Counter[Thread] = field(factory=Counter)

    def lock_wait_s(self, thread: Thread) -> float:
        """Return for how long a thread has waited: the share of looks that found it waiting, of the time."""
        return self.seconds * self.waiting[thread] / max(1, self.looks)


@asynccontextmanager
async def watch_lock(pid: int, *, every_s: float) -> AsyncIterator[Waits]:
    """Look at all threads at random moments for as long as the block, on average ``every_s`` apart.

    A thread waits for the interpreter lock when it is in a system call on an address within the
    interpreter's global state: that is where the lock is, and no other lock is there. No thread is stopped.
    """
    waits = Waits()
    state = InterpreterState.find()
    began = trio.current_time()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_look, pid, state, every_s, waits)
        yield waits
        nursery.cancel_scope.cancel(reason="the block is left")
    waits.seconds = trio.current_time() - began


async def _look(pid: int, state: InterpreterState, every_s: float, waits: Waits) -> None:
    spans = {owner: state.addresses(owner) for owner in process_tree(pid)}
    while True:
        again = trio.current_time() + 1.0  # new threads are found then
        with _open_calls(list(spans)) as threads:
            while trio.current_time() < again:
                await trio.sleep(random.expovariate(1 / every_s))
                waits.looks += 1
                for (owner, thread), calls in threads.items():
                    if _waits_within(calls, spans[owner]):
                        waits.waiting[owner, thread] += 1


@contextmanager
def _open_calls(owners: list[int]) -> Iterator[dict[Thread, int]]:
    """Open the files with the system call that each thread is in."""
    with ExitStack() as stack:
        opened = {}
        for owner in owners:
            for folder in PROC.glob(f"{owner}/task/*"):
                with suppress(FileNotFoundError, ProcessLookupError):
                    opened[owner, int(folder.name)] = file = os.open(folder / "syscall", os.O_RDONLY)
                    stack.callback(os.close, file)
        yield opened


def _waits_within(calls: int, span: range) -> bool:
    try:
        call, _, arguments = os.pread(calls, 64, 0).partition(b" ")
    except ProcessLookupError:
        return False  # it has ended
    return call == FUTEX and int(arguments.partition(b" ")[0], 16) in span
