"""A graph's inputs: padded ids, and the weights by which it selects states, in NumPy."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt
from attrs import define, field

from trio_pool_serve.types import PoolingRequest

Weights = npt.NDArray[np.float32]


@define(eq=False)
class PaddedRows:
    """Rows of token ids, padded on the right to the longest.

    ``skipped`` are the leading tokens of each row that pooling leaves out: the instruction's. Where that is the whole
    input, it is pooled: there is nothing else.
    """

    requests: Sequence[PoolingRequest]
    pad_token_id: int
    lengths: npt.NDArray[np.int64] = field(init=False)
    skipped: npt.NDArray[np.int64] = field(init=False)
    attended: npt.NDArray[np.int64] = field(init=False)
    positions: npt.NDArray[np.int64] = field(init=False)
    _own: npt.NDArray[np.bool_] = field(init=False)
    """Which positions belong to a row: [rows, tokens]."""

    def __attrs_post_init__(self) -> None:
        prompts = [request.prompt for request in self.requests]
        lengths = [len(prompt.token_ids) for prompt in prompts]
        attended = [len(prompt.token_ids) if prompt.attended is None else prompt.attended for prompt in prompts]
        skipped = np.array([prompt.instruction_tokens for prompt in prompts])
        self.lengths = np.array(lengths)
        self.skipped = np.where(skipped < self.lengths, skipped, 0)
        self.attended = np.array(attended)
        self.positions = np.arange(max(lengths))
        self._own = self.positions < self.lengths[:, None]

    def arrays(self, names: Sequence[str]) -> dict[str, npt.NDArray[np.generic]]:
        """Return the inputs of these names, [rows, tokens]: ``IDS`` in int64, selections in float32."""
        return {name: INPUTS[name](self) for name in names}

    def ids(self) -> npt.NDArray[np.int64]:
        """Return the padded ids."""
        return self._padded([request.prompt.token_ids for request in self.requests], self.pad_token_id)

    def mask(self) -> npt.NDArray[np.int64]:
        """Return 1 for each token that is attended to, else 0."""
        return (self.positions < self.attended[:, None]).astype(np.int64)

    def type_ids(self) -> npt.NDArray[np.int64]:
        """Return the padded segments."""
        prompts = [request.prompt for request in self.requests]
        if all(prompt.type_ids is None for prompt in prompts):
            return np.zeros(self._own.shape, np.int64)
        return self._padded(
            [np.zeros_like(prompt.token_ids) if prompt.type_ids is None else prompt.type_ids for prompt in prompts], 0
        )

    def _padded(self, rows: Sequence[npt.NDArray[np.int32]], padding: int) -> npt.NDArray[np.int64]:
        padded = np.full(self._own.shape, padding, np.int64)
        padded[self._own] = np.concatenate(rows)
        return padded

    def at(self, positions: npt.NDArray[np.int64]) -> Weights:
        """Return weights that select one token of each row."""
        weights: Weights = (self.positions == positions[:, None]).astype(np.float32)
        return weights

    def pooled(self) -> Weights:
        """Return 1 for each token that is pooled, else 0."""
        return (self._own & (self.positions >= self.skipped[:, None])).astype(np.float32)

    def weighted(self) -> Weights:
        """Weigh the token at position i (from 1) by i: SGPT, https://arxiv.org/abs/2202.08904, eq. 4."""
        weights = self.pooled() * (self.positions + 1).astype(np.float32)
        shares: Weights = np.divide(weights, weights.sum(axis=1, keepdims=True), dtype=np.float32)
        return shares

    def divided(self, divisors: npt.NDArray[np.generic]) -> Weights:
        """Return the pooled tokens' weights, divided by a number for each row."""
        weights: Weights = np.divide(self.pooled(), divisors[:, None], dtype=np.float32)
        return weights


SELECTIONS: Mapping[str, Callable[[PaddedRows], Weights]] = {
    "cls": lambda rows: rows.at(rows.skipped),
    "max": PaddedRows.pooled,
    "mean": lambda rows: rows.divided(rows.lengths - rows.skipped),
    "mean_sqrt_len_tokens": lambda rows: rows.divided(np.sqrt(rows.lengths - rows.skipped)),
    "weightedmean": PaddedRows.weighted,
    "lasttoken": lambda rows: rows.at(rows.lengths - 1),
    "last_attended": lambda rows: rows.at(rows.attended - 1),
    "whole_mean": lambda rows: ((rows.positions < rows.lengths[:, None]) / rows.lengths[:, None]).astype(np.float32),
}
"""Weights by which states are summed, by name: the pooling types of ``runner.heads.pooling``, and two of classifiers.
Of ``max`` it only matters which weights are 0."""

IDS: Mapping[str, Callable[[PaddedRows], npt.NDArray[np.int64]]] = {
    "input_ids": PaddedRows.ids,
    "attention_mask": PaddedRows.mask,
    "token_type_ids": PaddedRows.type_ids,
}
"""Ids and what belongs to them, by name; the last one only if the model has segments."""

INPUTS: Mapping[str, Callable[[PaddedRows], npt.NDArray[np.generic]]] = {**IDS, **SELECTIONS}
