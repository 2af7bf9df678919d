"""A runner without a model, for testing what stands above runners.

It computes a checkable answer from the token ids, and does on request what real devices do at the worst
moment: wait, raise, die.
"""

import threading
from collections.abc import Callable

import numpy as np
from attrs import define, field

from trio_pool_serve.runner.copied_batch import CopiedBatch
from trio_pool_serve.types import Batch, PooledBatch, TokenIds, Vectors


def scripted_vector(token_ids: TokenIds, dimensions: int) -> Vectors:
    """Return the answer for one row, shape (dimensions,): length, sum, first id, last id, zeros."""
    vector = np.zeros(max(dimensions, 4), dtype=np.float32)
    vector[:4] = len(token_ids), token_ids.sum(), token_ids[0], token_ids[-1]
    return vector[:dimensions]


@define(eq=False)
class ScriptedRunner:
    """Answers with ``scripted_vector``; ``on_launch`` may block, raise, or return a handle of its own.

    ``batches`` keeps what has been launched, in order. Clear ``gate`` to make launches wait.
    """

    dimensions: int = 8
    default_batch_tokens: int = 64
    on_launch: Callable[[Batch], PooledBatch | None] | None = None
    batches: list[Batch] = field(factory=list, init=False)
    launching: threading.Event = field(factory=threading.Event, init=False)
    """Set as soon as any launch has begun."""
    gate: threading.Event = field(factory=threading.Event, init=False)
    """Launches wait until it is set, as it is at first."""

    def __attrs_post_init__(self) -> None:
        self.gate.set()

    def launch(self, batch: Batch) -> PooledBatch:
        """Compute a batch, or do what the script says."""
        self.batches.append(batch)
        self.launching.set()
        self.gate.wait()
        handle = self.on_launch(batch) if self.on_launch else None
        return handle or CopiedBatch(
            [
                scripted_vector(request.prompt.token_ids, request.params.dimensions or self.dimensions)
                for request in batch.requests
            ]
        )

    def describe(self) -> str:
        """One line for people."""
        return "scripted runner"

    @property
    def rows(self) -> list[int]:
        """Rows of each launched batch."""
        return [len(batch.requests) for batch in self.batches]
