"""The memory of large temporaries is kept by glibc's malloc for the next layer instead of being returned to the kernel.

A layer's intermediate states are megabytes. By default glibc returns memory of that size to the kernel when it is freed
and maps it again for the next layer; each of its pages then faults and is zeroed again: two to five thousand in a batch
of 32 texts of 34 tokens (all-MiniLM-L6-v2, bfloat16, one thread), and none where it is kept. As much is kept as the
largest batch needed.
"""

import ctypes
import os
import platform

M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
"""Parameter numbers of ``mallopt``, from glibc's malloc.h."""

TRIM_THRESHOLD_BYTES = 2**30
"""Free memory at the end of the heap that is not returned to the kernel."""

MMAP_THRESHOLD_BYTES = 2**25
"""Allocations of this size and more are mapped, and unmapped when freed: the most that glibc allows."""

MALLOC_VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")
"""Environment variables by which a user configures malloc."""


def retain_freed_memory() -> bool:
    """Make glibc's malloc keep freed memory, for the whole process; return whether it does.

    Does nothing with another C library, or if one of ``MALLOC_VARIABLES`` is set.
    """
    if platform.libc_ver()[0] != "glibc" or any(name in os.environ for name in MALLOC_VARIABLES):
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return bool(mallopt(M_MMAP_THRESHOLD, MMAP_THRESHOLD_BYTES) and mallopt(M_TRIM_THRESHOLD, TRIM_THRESHOLD_BYTES))
