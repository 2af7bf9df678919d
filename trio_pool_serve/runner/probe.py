"""The comparison of two computations of one model on random token ids."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from trio_pool_serve.runner.forward_pass import Compute, ForwardPass
from trio_pool_serve.runner.row_states import RowStates
from trio_pool_serve.types import PoolingRequest, RenderedPrompt, TokenIds

TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 0.03, torch.float16: 0.01}
"""Largest relative difference of a row's output between computations that round differently. bfloat16 alone accounts
for a third of its own."""


def probe_rows(vocab_size: int, lengths: Sequence[int]) -> list[TokenIds]:
    """Return rows of random ids, the same on each call."""
    random = np.random.default_rng(0)
    return [random.integers(vocab_size, size=length).astype(np.int32) for length in lengths]


def compute_rows(
    compute: Compute, rows: Sequence[TokenIds], *, pad_token_id: int, device: torch.device
) -> list[Tensor]:
    """Return the output for each row in float32, without padding."""
    requests = [PoolingRequest(RenderedPrompt(row)) for row in rows]
    with torch.inference_mode():
        return states_of_rows(compute(ForwardPass(requests, device, pad_token_id)))


def states_of_rows(states: RowStates) -> list[Tensor]:
    """Return the states of each row in float32, [tokens, width]."""
    return list(torch.split(states.at(states.cells).float(), states.lengths.tolist()))


def difference(ours: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Return the largest relative difference of all rows."""
    return max(float((a - b).norm() / b.norm()) for a, b in zip(ours, expected, strict=True))
