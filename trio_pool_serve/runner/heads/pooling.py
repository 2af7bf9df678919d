"""Pooling: token states to one vector per row.

The formulas are those of sentence-transformers' modules of the same names, computed in float32.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

PoolingType = Callable[[Tensor, Tensor], Tensor]
"""(states [rows, tokens, hidden] float32, mask [rows, tokens] bool) → [rows, hidden] float32."""


def _cls(states: Tensor, mask: Tensor) -> Tensor:
    first = mask.int().argmax(dim=1)
    return states[torch.arange(len(states), device=states.device), first]


def _last(states: Tensor, mask: Tensor) -> Tensor:
    last = mask.shape[1] - 1 - mask.flip(1).int().argmax(dim=1)
    return states[torch.arange(len(states), device=states.device), last]


def _max(states: Tensor, mask: Tensor) -> Tensor:
    return states.masked_fill(~mask.unsqueeze(-1), float("-inf")).amax(dim=1)


def _sum(states: Tensor, weights: Tensor) -> Tensor:
    return torch.bmm(weights.unsqueeze(1), states).squeeze(1)


def _mean(states: Tensor, mask: Tensor) -> Tensor:
    return _sum(states, mask.float()) / mask.sum(dim=1, keepdim=True).clamp(min=1)


def _mean_sqrt_len(states: Tensor, mask: Tensor) -> Tensor:
    return _sum(states, mask.float()) / mask.sum(dim=1, keepdim=True).clamp(min=1).sqrt()


def _weighted_mean(states: Tensor, mask: Tensor) -> Tensor:
    """Weigh the token at position i (from 1) by i: SGPT, https://arxiv.org/abs/2202.08904, eq. 4."""
    weights = mask * torch.arange(1, mask.shape[1] + 1, device=mask.device, dtype=torch.float32)
    return _sum(states, weights) / weights.sum(dim=1, keepdim=True).clamp(min=1e-9)


POOLING_TYPES: Mapping[str, PoolingType] = {
    "cls": _cls,
    "max": _max,
    "mean": _mean,
    "mean_sqrt_len_tokens": _mean_sqrt_len,
    "weightedmean": _weighted_mean,
    "lasttoken": _last,
}
"""By their names in ``1_Pooling/config.json``; several are concatenated in this order."""


class Normalize(nn.Module):
    """Scale rows to unit length."""

    def forward(self, rows: Tensor) -> Tensor:
        """Map [rows, d] to [rows, d]."""
        return nn.functional.normalize(rows, dim=-1)


class Pooler(nn.Module):
    """Pooling and the modules after it, in float32.

    ``pooling`` are names of ``POOLING_TYPES``, concatenated in that order; none for a model whose output is one vector
    per row already. ``normalizes`` is whether the last module is a ``Normalize``: the head applies it, after truncating
    a row to the requested dimensions.
    """

    def __init__(self, pooling: Sequence[str], modules: Sequence[nn.Module]) -> None:
        super().__init__()
        self.pooling = tuple(pooling)
        self.normalizes = bool(modules) and isinstance(modules[-1], Normalize)
        self.modules_after = nn.ModuleList(modules[:-1] if self.normalizes else modules).float()

    def forward(self, states: Tensor, mask: Tensor) -> Tensor:
        """Map states [rows, tokens, hidden] and mask [rows, tokens] (bool) to [rows, d] float32.

        Without pooling the states are [rows, hidden] and the mask is not used.
        """
        rows = states.float()
        if self.pooling:
            rows = torch.cat([POOLING_TYPES[name](rows, mask) for name in self.pooling], dim=-1)
        for module in self.modules_after:
            rows = module(rows)
        return rows
