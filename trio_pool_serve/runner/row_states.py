"""A backbone's output for the tokens of a batch's rows, padded or packed."""

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch
from attrs import frozen
from torch import Tensor, nn

from trio_pool_serve.runner.batch_rows import Indices
from trio_pool_serve.runner.torch_device import to_device


@frozen(eq=False)
class RowStates:
    """The state of token t of row r is ``flat[begins[r] + t]``; row r has ``lengths[r]`` tokens.

    ``flat`` is [cells, width], on the device; ``begins`` and ``lengths`` are int64, [rows], on the host: which cells
    are read is known there, so nothing waits for the device. Rows of a model whose output is one vector per row have
    one cell each.
    """

    flat: Tensor
    begins: Indices
    lengths: Indices

    @classmethod
    def of_output(cls, output: Tensor, lengths: Indices) -> "RowStates":
        """Return the states of rows [rows, longest, width], padded on the right, or of one vector per row."""
        if output.dim() == 2:
            return cls(output, np.arange(len(output)), np.ones(len(output), np.int64))
        rows, longest, width = output.shape
        return cls(output.reshape(rows * longest, width), longest * np.arange(rows), lengths)

    @classmethod
    def packed(cls, flat: Tensor, lengths: Indices) -> "RowStates":
        """Return the states of rows that lie one after the other."""
        return cls(flat, np.cumsum(lengths) - lengths, lengths)

    def select(self, rows: Sequence[int]) -> "RowStates":
        """Return the states of some rows; nothing is copied."""
        return RowStates(self.flat, self.begins[rows], self.lengths[rows])

    def copied(self) -> "RowStates":
        """Return the same states in memory of their own: the cells up to the last row's."""
        return RowStates(self.flat[: int((self.begins + self.lengths).max())].clone(), self.begins, self.lengths)

    def at(self, cells: Indices) -> Tensor:
        """Return states [n, width]; a copy, unless they are all cells in order."""
        if len(cells) == len(self.flat) and np.array_equal(cells, np.arange(len(cells))):
            return self.flat
        return self.flat.index_select(0, to_device(cells, self.flat.device))

    @cached_property
    def cells(self) -> Indices:
        """The cells of all tokens, row after row."""
        return self.cells_from(np.zeros_like(self.lengths))

    def cells_from(self, skipped: Indices) -> Indices:
        """Return the cells of all tokens but the first ``skipped[r]`` of each row."""
        counts = self.lengths - skipped
        ends = np.cumsum(counts)
        cells: Indices = np.arange(ends[-1]) + np.repeat(self.begins + skipped - (ends - counts), counts)
        return cells

    def sums(self, skipped: Indices, weights: npt.NDArray[np.float32] | None = None) -> Tensor:
        """Return the sums over all tokens but the first ``skipped[r]`` of each row: [rows, width] float32.

        ``weights`` has one number for each of these tokens.
        """
        if len(self.lengths) == 1 and weights is None:  # no index is copied to the device
            begin, end = int(self.begins[0] + skipped[0]), int(self.begins[0] + self.lengths[0])
            return self.flat[begin:end].float().sum(dim=0, keepdim=True)
        cells, bags = self._bags(skipped)
        scales = None if weights is None else to_device(weights, self.flat.device)
        return nn.functional.embedding_bag(cells, self.flat.float(), bags, mode="sum", per_sample_weights=scales)

    def means(self, skipped: Indices) -> Tensor:
        """Return the means over all tokens but the first ``skipped[r]`` of each row: [rows, width] float32."""
        return divided(self.sums(skipped), np.maximum(1, self.lengths - skipped))

    def maxima(self, skipped: Indices) -> Tensor:
        """Return the maxima over these tokens, [rows, width]; zeros for a row without any."""
        if self.flat.device.type == "cpu":  # a pass over each row takes half the time of ``embedding_bag``
            begins, ends = self.begins + skipped, self.begins + self.lengths
            spans = [self.flat[begin:end] for begin, end in zip(begins.tolist(), ends.tolist(), strict=True)]
            return torch.stack([span.amax(dim=0) if len(span) else span.sum(dim=0) for span in spans])
        cells, bags = self._bags(skipped)
        return nn.functional.embedding_bag(cells, self.flat, bags, mode="max")

    def _bags(self, skipped: Indices) -> tuple[Tensor, Tensor]:
        cells = self.cells_from(skipped)
        counts = self.lengths - skipped
        both = to_device(np.concatenate([cells, np.cumsum(counts) - counts]), self.flat.device)
        return both[: len(cells)], both[len(cells) :]


def divided(rows: Tensor, divisors: npt.NDArray[np.generic]) -> Tensor:
    """Return rows [rows, width], each divided by a number of its own."""
    if len(divisors) == 1:
        return rows / float(divisors[0])
    return rows / to_device(divisors.astype(np.float32)[:, None], rows.device)


def concatenate(parts: Sequence[RowStates], rows: Sequence[Sequence[int]]) -> RowStates:
    """Return the states of a batch from parts: ``parts[i]`` has the states of ``rows[i]``."""
    begins = np.empty(sum(map(len, rows)), np.int64)
    lengths = np.empty_like(begins)
    before = 0
    for part, places in zip(parts, rows, strict=True):
        begins[list(places)] = part.begins + before
        lengths[list(places)] = part.lengths
        before += len(part.flat)
    return RowStates(torch.cat([part.flat for part in parts]), begins, lengths)
