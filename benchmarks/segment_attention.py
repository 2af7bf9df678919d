"""Attention over packed rows, segment by segment: on any device in any dtype, and slow.

In place of torch's variable-length attention where there is no GPU.
"""

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from trio_pool_serve.runner.cuda.varlen import refuse_unknown, window_of

ONE_BY_ONE = "trio_pool_serve_one_by_one"


def one_by_one_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,  # noqa: FBT001  (transformers' signature)
    **options: Any,
) -> tuple[Tensor, None]:
    """Compute the same as ``flash_attention``, segment by segment."""
    del attention_mask
    refuse_unknown(options)
    left, right = window_of(module, sliding_window=sliding_window, is_causal=is_causal)
    parts = []
    for begin, end in pairwise(options["cu_seq_lens_q"].tolist()):
        distance = torch.arange(end - begin, device=query.device)
        distance = distance[None, :] - distance[:, None]
        visible = torch.ones_like(distance, dtype=torch.bool)
        if left >= 0:
            visible &= distance >= -left
        if right >= 0:
            visible &= distance <= right
        part = nn.functional.scaled_dot_product_attention(
            query[:, :, begin:end],
            key[:, :, begin:end],
            value[:, :, begin:end],
            attn_mask=visible,
            scale=scaling,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        parts.append(part)
    parts.append(torch.zeros_like(query[:, :, sum(part.shape[2] for part in parts) :]))  # what belongs to no row
    return torch.cat(parts, dim=2).transpose(1, 2), None


AttentionInterface.register(ONE_BY_ONE, one_by_one_attention)
