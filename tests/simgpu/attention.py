"""Attention as the device has it: one kernel each."""

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor


def scaled_dot_product_attention(*args: Any, **kwargs: Any) -> Tensor:
    """torch's, in one kernel."""
    return torch.nn.functional.scaled_dot_product_attention(*args, **kwargs)


def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    begins: Tensor,
    key_begins: Tensor,
    max_q: int,
    max_k: int,
    is_causal: bool = False,
    scale: float | None = None,
    window_size: list[int] | None = None,
    enable_gqa: bool = False,
    *rest: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """``torch.ops.torch_attn._varlen_attn``: query, key and value [tokens, heads, d]; ``begins`` int32 [rows + 1].

    What belongs to no row is NaN, as the kernel leaves it unwritten.
    """
    del is_causal, rest, key_begins
    others = torch.empty(0, device=query.device), torch.empty(0, device=query.device)
    output = torch.full_like(query, float("nan"))
    left, right = window_size or (-1, -1)
    for begin, end in pairwise(begins.tolist()):
        assert 0 <= begin <= end <= len(query)
        assert end - begin <= min(max_q, max_k), "a row is longer than what the kernel was told"
        if begin == end:
            continue
        places = torch.arange(end - begin)
        distance = places[None, :] - places[:, None]
        visible = ((distance >= -left) | (left < 0)) & ((distance <= right) | (right < 0))
        parts = (states[begin:end].transpose(0, 1)[None] for states in (query, key, value))
        row = torch.nn.functional.scaled_dot_product_attention(
            *parts, attn_mask=visible, scale=scale, enable_gqa=enable_gqa
        )
        output[begin:end] = row[0].transpose(0, 1)
    return output, *others
