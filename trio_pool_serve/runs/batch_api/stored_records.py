"""The stored records of files and batches, and the states of a batch."""

import secrets
from collections.abc import Mapping
from typing import Literal, TypeAlias

from attrs import Factory, frozen

from trio_pool_serve.runs.requests.request_lines import BatchError
from trio_pool_serve.runs.run import Position

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
    """Return OpenAI's name for the time at which a batch entered a state."""
    return "created_at" if status == "validating" else f"{status}_at"


def new_id(prefix: str) -> str:
    """Return an id that nothing else has."""
    return prefix + secrets.token_hex(16)


@frozen(kw_only=True)
class StoredFile:
    """A file that is complete. ``owner`` is the name of an API key, empty without keys; times are Unix timestamps."""

    id: str
    owner: str
    purpose: str
    filename: str
    bytes: int
    created_at: int
    expires_at: int | None = None
    digest: str = ""
    """SHA-256 of an uploaded file."""


@frozen(kw_only=True)
class StoredBatch:
    """A batch. ``times`` are Unix timestamps by OpenAI's names, without ``expires_at``.

    ``models`` are the names of the models that its API key may use, ``None`` for all. ``digest`` (SHA-256) and
    ``input_created_at`` describe the input. ``output_id`` and ``error_id`` are the ids that the results have once
    there are some; then they are in ``output_file_id`` and ``error_file_id``, too.
    """

    id: str
    owner: str
    endpoint: str
    input_file_id: str
    completion_window: str
    expires_at: int
    output_id: str
    error_id: str
    digest: str = ""
    input_created_at: int = 0
    status: BatchStatus = "validating"
    times: Mapping[str, int] = Factory(dict)
    metadata: Mapping[str, str] | None = None
    models: frozenset[str] | None = None
    model: str | None = None
    total: int = 0
    is_expired: bool = False
    """Whether its time was over before all of its lines were computed."""
    position: Position = Factory(Position)
    errors: tuple[BatchError, ...] = ()
    results_expire_s: int | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
