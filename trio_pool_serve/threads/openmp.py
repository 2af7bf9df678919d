"""How OpenMP's threads wait for each other."""

import os

SPINS = 10_000
"""Rounds that a thread spins before it sleeps: enough to be as fast from one kernel to the next as with libgomp's own
300,000. Those keep a core busy after a forward pass, when the event loop and whoever asked need it; and a thread whose
partner has lost its core waits by spinning on its own."""


def limit_openmp_spinning() -> None:
    """Have libgomp's threads sleep soon, unless the environment says how they wait. Before torch is imported."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", str(SPINS))
