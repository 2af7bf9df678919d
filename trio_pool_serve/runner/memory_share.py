"""A GPU's memory, divided among the engine processes that compute on it."""

import fcntl
import os
import time
from collections.abc import Callable
from functools import partial

from attrs import evolve

from trio_pool_serve.types import Prepare, Runner, RunnerParams

DIVIDED = 0.95
"""Part of the free memory that is divided. The rest is for what libraries take beside torch: kernels that are loaded
when they are first used, and what CUDA needs to launch graphs. An estimate: not measured on a GPU yet."""

LOADING_S = 60.0
"""Time for which a process that has loaded its model waits for the others."""


def load_with_share(load: Callable[[], Prepare], file: int, processes: int) -> Prepare:
    """Return what ``load`` returns, with params that have a ``memory_share``; raises its errors.

    That is a function: given one that measures the GPU's free bytes, it returns how many this process may use beside
    its weights. It is called once they are loaded, and may block for ``LOADING_S``.

    All ``processes`` on a GPU get the same share. It is measured once, by the first that holds a lock on ``file``
    alone. Before their parent starts any, it opens the file for each with a share of this lock
    (``open_with_shared_lock``), so all weights are there by then, and no batches. The file then contains the share, for
    the others and for processes that replace one of them. When a process ends, its parent closes the file, which ends
    the lock.
    """
    prepare = load()

    def prepare_with_share(params: RunnerParams) -> Runner:
        try:
            return prepare(evolve(params, memory_share=partial(_take, file, processes)))
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)  # if torch does not compute the model, nothing took a share
            os.close(file)

    return prepare_with_share


def _take(file: int, processes: int, free_bytes: Callable[[], int]) -> int:
    """Return the share in bytes, once the other processes have loaded, or after ``LOADING_S``."""
    give_up_at = time.monotonic() + LOADING_S
    while time.monotonic() < give_up_at:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # if that fails, this process holds no lock any more
            break
        except BlockingIOError:
            time.sleep(0.05)
    share = int(os.pread(file, 20, 0) or DIVIDED * free_bytes() / processes)
    os.pwrite(file, b"%20d" % share, 0)
    fcntl.flock(file, fcntl.LOCK_UN)
    return share
