"""Memory that a process keeps: freed memory of malloc's, caches for each shape of a batch, and frozen objects.

glibc returns freed memory to the kernel only from the end of a heap, and by default often: each batch then pays page
faults for memory that the batch before has freed. So a process that computes keeps as much as its largest batch needs,
and returns the rest, anywhere in the heap, every ``RETURN_EVERY_S`` seconds in which it computed.
"""

import ctypes
import gc
import mmap
import os
import platform
import resource
import sys
from pathlib import Path

M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
M_ARENA_MAX = -8
"""Parameter numbers of ``mallopt``, from glibc's malloc.h."""

MMAP_THRESHOLD_BYTES = 2**25
"""Allocations of at least this size are mapped, and unmapped when freed: the most that glibc allows."""

MAX_ARENAS = 2
"""Heaps of one process: one for the main thread, one for all others. glibc's default is eight for each core, each of
which keeps its freed memory."""

MALLOC_VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_ARENA_MAX", "GLIBC_TUNABLES")
"""Environment variables with which users configure malloc: if any of them is set, nothing is changed."""

RETURN_EVERY_S = 15.0
"""Time between two calls of ``return_freed_memory``. One takes 2 to 20 ms, and after it returned 50 MiB, 13,000 pages
are faulted in again (MiniLM in float32, 150 shapes of at most 256 tokens, two cores): about 1/500 of that time."""

ONEDNN_PRIMITIVES = 256
"""Kernels that oneDNN keeps: one for each layer's shape and number of tokens. Its default, 1,024, takes 250 MiB per
process with MiniLM in bfloat16. A kernel that is missing costs about a millisecond: 3 % of the CPU time of batches of
100 tokens in shapes that are all new."""


def prepare_for_loading() -> None:
    """Limit malloc's arenas and oneDNN's primitives, unless the environment does, and collect garbage rarely.

    Call before torch is imported, and ``freeze_objects`` once the models are loaded.
    """
    gc.set_threshold(*THRESHOLDS_WHILE_LOADING)
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", str(ONEDNN_PRIMITIVES))
    if _may_configure():
        ctypes.CDLL(None).mallopt(M_ARENA_MAX, MAX_ARENAS)


def retain_freed_memory(size: int) -> bool:
    """Make malloc keep ``size`` freed bytes at the end of its heap, and return whether it does.

    Holds for the whole process, until the next call. Does nothing with another C library, or if one of
    ``MALLOC_VARIABLES`` is set.
    """
    if not _may_configure():
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return bool(mallopt(M_MMAP_THRESHOLD, MMAP_THRESHOLD_BYTES) and mallopt(M_TRIM_THRESHOLD, size))


def return_freed_memory() -> None:
    """Return freed memory to the kernel, also from the middle of a heap. Blocks for milliseconds.

    Does nothing with another C library, or if one of ``MALLOC_VARIABLES`` is set.
    """
    if _may_configure():
        ctypes.CDLL(None).malloc_trim(0)


def return_mapped_pages(file: Path) -> None:
    """Return the pages of ``file`` that this process has mapped read-only to the kernel; they are read again on use.

    For weights that a library has copied into layouts of its own, but keeps mapped: their pages would count as this
    process's memory. For OpenVINO, call it after the first inference, which reads them again; after that only the table
    of embeddings is read, from the page cache (MiniLM in float32: 87 MiB before, at most 46 MiB of the table later).
    Takes 0.3 to 3 ms. Does nothing except on Linux. Blocking.
    """
    if sys.platform != "linux":
        return
    path = os.fsencode(file.resolve())
    libc = ctypes.CDLL(None)
    for line in Path("/proc/self/maps").read_bytes().splitlines():
        addresses, access, _, _, _, *name = line.split(maxsplit=5)
        is_of_file = b"".join(name).removesuffix(b" (deleted)") == path
        if is_of_file and b"w" not in access:  # a private page that was written to would be lost
            first, end = (int(address, 16) for address in addresses.split(b"-"))
            libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(end - first), mmap.MADV_DONTNEED)


def _may_configure() -> bool:
    return platform.libc_ver()[0] == "glibc" and not any(name in os.environ for name in MALLOC_VARIABLES)


THRESHOLDS_WHILE_LOADING = 50_000, 10, 20
"""Thresholds of the garbage collector; Python's default is 700, 10, 10. Imported and loaded objects stay, and walking
through them again and again takes a tenth of the time: 3.7 CPU seconds instead of 3.4 with torch and transformers."""

THRESHOLDS = 10_000, 10, 20
"""Thresholds after loading. With Python's default, the objects of requests were walked through every few seconds, for
30 to 130 ms with the lines of a job of the Batch API, to find next to nothing: nearly all objects are freed when their
last reference goes."""


def freeze_objects() -> None:
    """Exempt all objects that exist now from garbage collection, and collect others more rarely.

    Otherwise the collector would walk through all of them, with the interpreter lock, for as long as a dozen batches
    take, each time a large request has allocated a quarter as much again.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)


def collect_garbage(*, thaws: bool) -> None:
    """Collect unreachable objects, reference cycles included; with ``thaws``, frozen ones, too.

    Takes about a millisecond without ``thaws`` if objects are frozen, otherwise 0.2 s with torch and transformers
    imported. The interpreter lock is held meanwhile.
    """
    frozen = thaws and gc.get_freeze_count() > 0
    if frozen:
        gc.unfreeze()
    gc.collect()
    if frozen:
        gc.freeze()


def resident_bytes() -> int:
    """Return this process's resident memory in bytes; shared memory counts in each process. Blocks for microseconds.

    0 without Linux's ``/proc``.
    """
    try:
        return int(Path("/proc/self/statm").read_bytes().split()[1]) * resource.getpagesize()
    except OSError:
        return 0


class _MallocInfo(ctypes.Structure):
    """``struct mallinfo2`` of glibc's malloc.h."""

    _names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = tuple((name, ctypes.c_size_t) for name in _names.split())


def allocated_bytes() -> int:
    """Return the bytes that malloc has handed out and not got back. Blocks for microseconds.

    Resident memory grows by less than is allocated if malloc has kept freed memory for that. 0 without glibc 2.33.
    """
    read = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if read is None:
        return 0
    read.restype = _MallocInfo
    info = read()
    return int(info.uordblks + info.hblkhd)
