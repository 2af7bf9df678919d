"""The index tensors that pack padded rows and unpack them."""

from collections.abc import Sequence
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from attrs import frozen
from torch import Tensor

from trio_pool_serve.runner.forward_pass import host_buffer

PositionRule: TypeAlias = Literal["counted", "past padding"]
"""How a model numbers a row's positions. counted: 0, 1, 2 …. past padding: as RoBERTa does, from the padding token's id
plus 1, without counting padding tokens inside the row."""

POSITION_RULES: tuple[PositionRule, ...] = ("counted", "past padding")


@frozen(eq=False)
class Packing:
    """The indices from padded rows to packed rows and back.

    ``tokens`` [total] are the cells of the flattened padded rows that hold the packed tokens. ``cells`` [rows, longest]
    are the packed tokens of the padded rows' cells; padding has the index of the row's last token. ``positions`` is
    [1, total]. Segment i reaches from ``cu_seqlens[i]`` to ``cu_seqlens[i + 1]`` (int32, [rows + 1]); the longest has
    ``longest`` tokens.
    """

    tokens: Tensor
    cells: Tensor
    positions: Tensor
    cu_seqlens: Tensor
    longest: int


def pack(
    token_ids: Sequence[npt.NDArray[np.int32]], rule: PositionRule, *, pad_token_id: int, device: torch.device
) -> Packing:
    """Return the packing of rows, on the device."""
    lengths = np.array([len(row) for row in token_ids])
    rows, longest, total = len(lengths), int(lengths.max()), int(lengths.sum())
    buffer = host_buffer(8 * (2 * total + rows * longest) + 4 * (rows + 1), device)
    numbers = buffer[: -4 * (rows + 1)].view(torch.int64)
    places, positions, cells = numbers.numpy()[:total], numbers.numpy()[total:][:total], numbers.numpy()[2 * total :]
    cu_seqlens = buffer[-4 * (rows + 1) :].view(torch.int32).numpy()
    cu_seqlens[0] = 0
    np.cumsum(lengths, out=cu_seqlens[1:])
    columns = np.arange(longest)
    places[:] = np.flatnonzero(columns < lengths[:, None])
    begins = cu_seqlens[:-1].astype(np.int64)
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
        cu_seqlens=on_device[-4 * (rows + 1) :].view(torch.int32),
        longest=longest,
    )
