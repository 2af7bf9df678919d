"""The states of a batch, and which follow which."""

from collections.abc import Mapping
from typing import Literal, TypeAlias

BatchStatus: TypeAlias = Literal[
    "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"
]

TRANSITIONS: Mapping[BatchStatus, frozenset[BatchStatus]] = {
    "validating": frozenset({"in_progress", "failed", "cancelling", "expired"}),
    "in_progress": frozenset({"finalizing", "failed", "cancelling"}),
    "finalizing": frozenset({"completed", "expired", "failed"}),
    "cancelling": frozenset({"cancelled", "failed"}),
    "completed": frozenset(),
    "expired": frozenset(),
    "failed": frozenset(),
    "cancelled": frozenset(),
}
"""A batch that expires while it is computed is finalizing while the lines that are left are written to its errors."""

FINAL = frozenset(status for status, following in TRANSITIONS.items() if not following)


def time_of(status: BatchStatus) -> str:
    """Return the name of the time at which a batch has come into a state."""
    return "created_at" if status == "validating" else f"{status}_at"
