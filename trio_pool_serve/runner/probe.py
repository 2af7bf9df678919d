"""Whether two ways to compute a model give the same: both are asked."""

from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trio_pool_serve.runner.forward_pass import ForwardPass, assemble
from trio_pool_serve.types import PoolingRequest, RenderedPrompt

Compute: TypeAlias = Callable[[ForwardPass], Tensor]
"""From rows on the device to what a backbone makes of them: [rows, tokens, …], or [rows, labels] of whole rows."""

TokenIds: TypeAlias = npt.NDArray[np.int32]

TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 0.03, torch.float16: 0.01}
"""Of a row's output, relative, for two ways that round differently. bfloat16 alone makes for a third of that."""


def probe_rows(vocab_size: int, lengths: Sequence[int]) -> list[TokenIds]:
    """Return rows of ids that mean nothing, the same each time."""
    random = np.random.default_rng(0)
    return [random.integers(vocab_size, size=length).astype(np.int32) for length in lengths]


def computed(compute: Compute, rows: Sequence[TokenIds], *, pad_token_id: int, device: torch.device) -> list[Tensor]:
    """Return what is made of each row, without what is made of padding: float32."""
    requests = [PoolingRequest(RenderedPrompt(row)) for row in rows]
    with torch.inference_mode():
        output = compute(assemble(requests, pad_token_id=pad_token_id, device=device)).float()
    return [states[: len(row)] if output.dim() == 3 else states for states, row in zip(output, rows, strict=True)]


def difference(ours: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Return the largest of all rows', relative to what is expected."""
    return max(float((a - b).norm() / b.norm()) for a, b in zip(ours, expected, strict=True))
