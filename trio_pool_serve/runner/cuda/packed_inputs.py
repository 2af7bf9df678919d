"""The rows of a batch one after the other, without padding, as a transformer takes them."""

from typing import Literal, TypeAlias

import numpy as np
import torch
from attrs import frozen
from torch import Tensor

from trio_pool_serve.runner.batch_rows import Indices
from trio_pool_serve.runner.forward_pass import ForwardPass
from trio_pool_serve.runner.torch_device import host_buffer

PositionRule: TypeAlias = Literal["counted", "past padding"]
"""How a model numbers a row's positions. counted: 0, 1, 2 …. past padding: as RoBERTa does, from the padding token's id
plus 1, without counting padding tokens inside the row."""

POSITION_RULES: tuple[PositionRule, ...] = ("counted", "past padding")
"""With the first, no position exceeds the length of a row."""


@frozen(order=True)
class PackedShape:
    """What determines the kernels of a pass: the number of ``tokens``, of ``rows``, and the longest row's tokens.

    Fewer rows of fewer tokens fit into a shape; the rest of it belongs to no row.
    """

    tokens: int
    rows: int
    longest: int

    def fits(self, other: "PackedShape") -> bool:
        """Return whether rows that fill this shape fit into another."""
        return self.tokens <= other.tokens and self.rows <= other.rows and self.longest <= other.longest

    @property
    def nbytes(self) -> int:
        """Bytes of the inputs: ids, positions and segments int64, and begins int32."""
        return 3 * 8 * self.tokens + 4 * (self.rows + 1)


@frozen(eq=False)
class PackedInputs:
    """Inputs of a shape: ``ids``, ``positions`` and ``segments`` are int64, [1, tokens].

    Row i reaches from ``begins[i]`` to ``begins[i + 1]`` (int32, [rows + 1]).
    """

    shape: PackedShape
    ids: Tensor
    positions: Tensor
    segments: Tensor
    begins: Tensor

    @classmethod
    def of_buffer(cls, shape: PackedShape, buffer: Tensor) -> "PackedInputs":
        """Return views of ``shape.nbytes`` bytes."""
        numbers = buffer[: 24 * shape.tokens].view(torch.int64).view(3, 1, shape.tokens)
        return cls(shape, numbers[0], numbers[1], numbers[2], buffer[24 * shape.tokens :].view(torch.int32))


def shape_of(lengths: Indices) -> PackedShape:
    """Return the shape that rows of these lengths fill."""
    return PackedShape(int(lengths.sum()), len(lengths), int(lengths.max()))


def fill(shape: PackedShape, forward: ForwardPass, rule: PositionRule) -> Tensor:
    """Return the bytes of ``PackedInputs`` for rows that fit into the shape, on the host, pinned for a GPU."""
    buffer = host_buffer(shape.nbytes, forward.device)
    inputs = PackedInputs.of_buffer(shape, buffer)
    ids, positions, segments = (tensor.numpy()[0] for tensor in (inputs.ids, inputs.positions, inputs.segments))
    begins = inputs.begins.numpy()
    prompts = [request.prompt for request in forward.requests]
    rows, total = len(prompts), int(forward.lengths.sum())
    begins[0] = 0
    np.cumsum(forward.lengths, out=begins[1 : rows + 1])
    begins[rows + 1 :] = total
    ids[:total] = np.concatenate([prompt.token_ids for prompt in prompts])
    ids[total:] = forward.pad_token_id
    row_begins = np.repeat(begins[:rows], forward.lengths)
    np.subtract(np.arange(total), row_begins, out=positions[:total])
    positions[total:] = 0
    if rule == "past padding":
        is_token = ids[:total] != forward.pad_token_id
        for prompt, begin in zip(prompts, begins.tolist(), strict=False):
            if prompt.embeds is not None:  # whose ids stand for nothing
                is_token[begin : begin + len(prompt.token_ids)] = True
        counted = np.cumsum(is_token)
        before = (counted - is_token)[row_begins]
        positions[:total] = (counted - before) * is_token + forward.pad_token_id
    segments[:] = 0
    for prompt, begin in zip(prompts, begins.tolist(), strict=False):
        if prompt.type_ids is not None:
            segments[begin : begin + len(prompt.type_ids)] = prompt.type_ids
    return buffer
