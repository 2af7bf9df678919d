"""How OpenMP's threads wait for each other: spinning briefly, then sleeping."""

import os

SPIN_ROUNDS = 10_000
"""Rounds that a thread spins before it sleeps: from one kernel to the next as fast as with libgomp's default, 300,000.
The default keeps a core busy after a forward pass, when the event loop and the clients need it, and while a thread
waits for another one that has lost its core."""


def limit_openmp_spinning() -> None:
    """Make libgomp's threads sleep early, unless the environment configures it. Call before torch is imported."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", str(SPIN_ROUNDS))
