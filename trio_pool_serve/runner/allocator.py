"""Memory of large temporaries, kept for the next layer instead of given back.

A layer's intermediate states are megabytes. glibc gives memory of that size back to the kernel when it is freed, and
takes it again for the next layer; each of its pages then faults and is zeroed anew: two to five thousand in a batch of
32 texts of 34 tokens (all-MiniLM-L6-v2, bfloat16, one thread), and none where it is kept. What is kept is as much as
the largest batch needed.
"""

import ctypes
import os
import platform

M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
"""Numbers of glibc's malloc.h."""

KEPT_BYTES = 2**30
"""Free memory at the heap's end that is not given back."""

MAPPED_BYTES = 2**25
"""From here on memory is mapped for itself, and unmapped when freed: the most that glibc allows."""

OWN_SETTINGS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


def retain_freed_memory() -> bool:
    """Have glibc's malloc keep what is freed, for the whole process; tell whether it does.

    Nothing happens with another C library, or where whoever started the process has settled it by the environment.
    """
    if platform.libc_ver()[0] != "glibc" or any(name in os.environ for name in OWN_SETTINGS):
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return bool(mallopt(M_MMAP_THRESHOLD, MAPPED_BYTES) and mallopt(M_TRIM_THRESHOLD, KEPT_BYTES))
