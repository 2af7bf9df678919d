"""Rows put one after the other, and taken apart again."""

from collections.abc import Sequence
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from attrs import frozen
from torch import Tensor

from trio_pool_serve.runner.forward_pass import host_buffer

PositionRule: TypeAlias = Literal["counted", "past padding"]
"""How a model numbers a row's tokens. counted: 0, 1, 2 …. past padding: as RoBERTa does, from the padding token's id
on, padding tokens among the others left out."""

POSITION_RULES: tuple[PositionRule, ...] = ("counted", "past padding")


@frozen(eq=False)
class Packing:
    """Where the tokens of padded rows are once they lie one after the other.

    ``tokens`` [total] has their places among the padded rows' cells, and ``cells`` [rows, longest] the other way
    round; padding reads the row's last token. ``positions`` is [1, total]. Segment i reaches from ``bounds[i]`` to
    ``bounds[i + 1]`` (int32, [rows + 1]), and none is longer than ``longest``.
    """

    tokens: Tensor
    cells: Tensor
    positions: Tensor
    bounds: Tensor
    longest: int


def pack(
    token_ids: Sequence[npt.NDArray[np.int32]], rule: PositionRule, *, pad_token_id: int, device: torch.device
) -> Packing:
    """Return how rows are put together."""
    lengths = np.array([len(row) for row in token_ids])
    rows, longest, total = len(lengths), int(lengths.max()), int(lengths.sum())
    buffer = host_buffer(8 * (2 * total + rows * longest) + 4 * (rows + 1), device)
    numbers = buffer[: -4 * (rows + 1)].view(torch.int64)
    places, positions, cells = numbers.numpy()[:total], numbers.numpy()[total:][:total], numbers.numpy()[2 * total :]
    bounds = buffer[-4 * (rows + 1) :].view(torch.int32).numpy()
    bounds[0] = 0
    np.cumsum(lengths, out=bounds[1:])
    columns = np.arange(longest)
    places[:] = np.flatnonzero(columns < lengths[:, None])
    begins = bounds[:-1].astype(np.int64)
    cells[:] = (begins[:, None] + np.minimum(columns, lengths[:, None] - 1)).ravel()
    positions[:] = np.arange(total) - np.repeat(begins, lengths)
    if rule == "past padding":
        counts = (np.concatenate(token_ids) != pad_token_id).astype(np.int64)
        counted = np.cumsum(counts)
        positions[:] = (counted - np.repeat(counted[begins] - counts[begins], lengths)) * counts + pad_token_id
    on_device = buffer.to(device, non_blocking=True)
    numbers = on_device[: -4 * (rows + 1)].view(torch.int64)
    return Packing(
        tokens=numbers[:total],
        positions=numbers[total : 2 * total][None],
        cells=numbers[2 * total :].view(rows, longest),
        bounds=on_device[-4 * (rows + 1) :].view(torch.int32),
        longest=longest,
    )
