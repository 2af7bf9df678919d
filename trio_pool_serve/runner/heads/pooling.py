"""Pooling: token states to one vector per row.

The formulas are the same as in sentence-transformers' modules of these names, computed in float32.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from attrs import frozen
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutput
from transformers.utils.generic import ModelOutput

from trio_pool_serve.runner.batch_rows import Indices
from trio_pool_serve.runner.row_states import RowStates, divided

PoolingType = Callable[[RowStates, Indices], Tensor]
"""(states of rows, number of leading tokens of each that are left out) → [rows, hidden] float32."""


def _weighted_mean(states: RowStates, skipped: Indices) -> Tensor:
    """Weigh the token at position i (from 1) by i: SGPT, https://arxiv.org/abs/2202.08904, eq. 4."""
    weights = [
        np.arange(begin + 1, end + 1, dtype=np.float32) for begin, end in zip(skipped, states.lengths, strict=True)
    ]
    return divided(states.sums(skipped, np.concatenate(weights)), np.array([of_row.sum() for of_row in weights]))


POOLING_TYPES: Mapping[str, PoolingType] = {
    "cls": lambda states, skipped: states.at(states.begins + skipped).float(),
    "max": lambda states, skipped: states.maxima(skipped).float(),
    "mean": RowStates.means,
    "mean_sqrt_len_tokens": lambda states, skipped: divided(
        states.sums(skipped), np.sqrt(np.maximum(1, states.lengths - skipped))
    ),
    "weightedmean": _weighted_mean,
    "lasttoken": lambda states, _: states.at(states.begins + states.lengths - 1).float(),
}
"""By their names in ``1_Pooling/config.json``; several are concatenated in this order."""


class Normalize(nn.Module):
    """Scale rows to unit length."""

    def forward(self, rows: Tensor) -> Tensor:
        """Map [rows, d] to [rows, d]."""
        return nn.functional.normalize(rows, dim=-1)


class Truncate(nn.Module):
    """sentence-transformers' ``truncate_dim``: the beginning of a vector, which is not normalised again."""

    def __init__(self, dimensions: int) -> None:
        super().__init__()
        self.dimensions = dimensions

    def forward(self, rows: Tensor) -> Tensor:
        """Map [rows, d] to [rows, at most ``dimensions``]."""
        return rows[:, : self.dimensions]


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

    def forward(self, states: RowStates, skipped: Indices) -> Tensor:
        """Map the states of rows to [rows, d] float32; the first ``skipped[r]`` tokens of each row are left out."""
        if self.pooling:
            pooled = [POOLING_TYPES[name](states, skipped) for name in self.pooling]
            rows = pooled[0] if len(pooled) == 1 else torch.cat(pooled, dim=-1)
        else:
            rows = states.at(states.begins).float()
        return self.after(rows)

    def after(self, rows: Tensor) -> Tensor:
        """Apply the modules after pooling: [rows, hidden] to [rows, d]."""
        for module in self.modules_after:
            rows = module(rows)
        return rows


@frozen(eq=False)
class LayerMean:
    """WeightedLayerPooling: the hook that replaces a transformer's states by a weighted mean of its hidden states.

    ``weights`` belong to the hidden states from number ``start`` on; number 0 is the embedding layer's output.
    """

    start: int
    weights: Sequence[float]

    def __call__(self, _model: nn.Module, _args: object, output: ModelOutput) -> BaseModelOutput:
        """Return the mean, [rows, tokens, hidden] float32, in place of the transformer's output."""
        states = (getattr(output, "hidden_states", None) or ())[self.start :]
        if len(states) != len(self.weights):
            raise ValueError(f"there are {len(self.weights)} layer_weights, but {len(states)} hidden states")
        weighted = [weight * state.float() for weight, state in zip(self.weights, states, strict=True)]
        return BaseModelOutput(last_hidden_state=sum(weighted) / sum(self.weights))
