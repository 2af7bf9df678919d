"""The rows of a batch in NumPy: padded ids, and the weights by which a converted model's graph selects states."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt
from attrs import frozen

from trio_pool_serve.types import PoolingRequest, RenderedPrompt

Indices = npt.NDArray[np.int64]

Weights = npt.NDArray[np.float32]

RowState: TypeAlias = Literal["first", "last_attended", "whole_mean"]
"""The state of a row that a classifier reads: its first token's (or the logits of a model with its own head), its last
attended token's, or the mean of all."""


ONE_LENGTH = "in batches of one length, as the model does not mask padding"
"""How such models are computed, in the words of the log."""


def of_one_length(requests: Sequence[PoolingRequest], rows: Iterable[int]) -> list[list[int]]:
    """Return the indices of rows in groups of one length: padding would change the outputs of some models."""
    groups: dict[int, list[int]] = {}
    for row in rows:
        groups.setdefault(requests[row].tokens, []).append(row)
    return list(groups.values())


def short_row(pad_token_id: int = 0) -> RenderedPrompt:
    """Return a row that models can compute: a token other than padding, eight times."""
    no_padding = int(pad_token_id == 0)  # the padding token may be the vocabulary's last
    return RenderedPrompt(np.full(8, no_padding, dtype=np.int32))


@frozen(eq=False)
class Rows:
    """Rows that are computed together. Their arrays, [rows, tokens], are padded on the right to the longest row."""

    requests: Sequence[PoolingRequest]
    pad_token_id: int

    @cached_property
    def lengths(self) -> Indices:
        """Number of tokens of each row."""
        return np.array([len(request.prompt.token_ids) for request in self.requests])

    @cached_property
    def skipped(self) -> Indices:
        """Number of leading tokens of each row that poolers leave out: the instruction's.

        If the instruction is the whole input, it is pooled: there is nothing else.
        """
        skipped = np.array([request.prompt.instruction_tokens for request in self.requests])
        return np.where(skipped < self.lengths, skipped, 0)

    @cached_property
    def attended(self) -> Indices:
        """Number of leading tokens of each row that are attended to."""
        prompts = [request.prompt for request in self.requests]
        return np.array([len(one.token_ids) if one.attended is None else one.attended for one in prompts])

    @cached_property
    def positions(self) -> Indices:
        """The positions of the longest row, [tokens]."""
        return np.arange(self.lengths.max())

    @cached_property
    def is_token(self) -> npt.NDArray[np.bool_]:
        """Which cells of [rows, tokens] are tokens of a row and no padding."""
        return self.positions < self.lengths[:, None]

    def arrays(self, names: Sequence[str]) -> dict[str, npt.NDArray[np.generic]]:
        """Return the inputs of these names, [rows, tokens]: ``IDS`` in int64, selections in float32."""
        return {name: INPUTS[name](self) for name in names}

    def ids(self) -> Indices:
        """Return the padded ids."""
        return self._padded([request.prompt.token_ids for request in self.requests], self.pad_token_id)

    def mask(self) -> Indices:
        """Return 1 for each token that is attended to, else 0."""
        return (self.positions < self.attended[:, None]).astype(np.int64)

    def segments(self) -> Indices:
        """Return the padded segments; zeros for rows without any."""
        given = [request.prompt.type_ids for request in self.requests]
        if all(types is None for types in given):
            return np.zeros(self.is_token.shape, np.int64)
        of_rows = zip(given, self.lengths.tolist(), strict=True)
        return self._padded([np.zeros(length, np.int32) if types is None else types for types, length in of_rows], 0)

    def _padded(self, rows: Sequence[npt.NDArray[np.int32]], padding: int) -> Indices:
        padded = np.full(self.is_token.shape, padding, np.int64)
        padded[self.is_token] = np.concatenate(rows)
        return padded

    def at(self, positions: Indices) -> Weights:
        """Return weights that select one token of each row."""
        return np.asarray(self.positions == positions[:, None], np.float32)

    def pooled(self) -> Weights:
        """Return 1 for each token that is pooled, else 0."""
        return (self.is_token & (self.positions >= self.skipped[:, None])).astype(np.float32)

    def weighted(self) -> Weights:
        """Weigh the token at position i (from 1) by i: SGPT, https://arxiv.org/abs/2202.08904, eq. 4."""
        weights = self.pooled() * (self.positions + 1).astype(np.float32)
        return np.asarray(np.divide(weights, weights.sum(axis=1, keepdims=True), dtype=np.float32))

    def divided(self, divisors: npt.NDArray[np.generic]) -> Weights:
        """Return the pooled tokens' weights, divided by a number for each row."""
        return np.asarray(np.divide(self.pooled(), divisors[:, None], dtype=np.float32))


SELECTIONS: Mapping[str, Callable[[Rows], Weights]] = {
    "cls": lambda rows: rows.at(rows.skipped),
    "max": Rows.pooled,
    "mean": lambda rows: rows.divided(rows.lengths - rows.skipped),
    "mean_sqrt_len_tokens": lambda rows: rows.divided(np.sqrt(rows.lengths - rows.skipped)),
    "weightedmean": Rows.weighted,
    "lasttoken": lambda rows: rows.at(rows.lengths - 1),
    "last_attended": lambda rows: rows.at(rows.attended - 1),
    "whole_mean": lambda rows: (rows.is_token / rows.lengths[:, None]).astype(np.float32),
}
"""Weights by which states are summed, by name: the pooling types of ``runner.heads.pooling``, and two of classifiers.
For ``max`` it only matters which weights are 0."""

IDS: Mapping[str, Callable[[Rows], Indices]] = {
    "input_ids": Rows.ids,
    "attention_mask": Rows.mask,
    "token_type_ids": Rows.segments,
}
"""Ids, masks and segments by the names of a model's inputs; segments only if the model has them."""

INPUTS: Mapping[str, Callable[[Rows], npt.NDArray[np.generic]]] = {**IDS, **SELECTIONS}
