"""Attention over packed rows, registered with transformers: each row attends to itself alone.

transformers looks attention functions up by name, and passes them the keyword arguments of the model's call, under the
names that its own flash attention uses. For a name without a mask function it makes no mask.
"""

import inspect
from itertools import pairwise
from typing import Any, Final, Literal, TypeAlias

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

FLASH: Final = "trio_pool_serve_varlen"
"""torch's variable-length flash attention, on CUDA in half precision."""

ONE_BY_ONE: Final = "trio_pool_serve_one_by_one"
"""Segment by segment, on any device in any dtype: slow, for tests."""

VarlenAttention: TypeAlias = Literal["trio_pool_serve_varlen", "trio_pool_serve_one_by_one"]


class CannotPackError(Exception):
    """A model cannot be computed packed; the message is the reason in a few words, for the log."""


def has_flash() -> bool:
    """Return whether this version of torch has variable-length attention with windows and grouped-query attention."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return False
    return {"scale", "window_size", "enable_gqa"} <= inspect.signature(varlen_attn).parameters.keys()


def _window(module: nn.Module, *, sliding_window: int | None, is_causal: bool | None) -> tuple[int, int]:
    """Return how many tokens to its left and to its right a token attends to, −1 for all."""
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    reach = -1 if sliding_window is None else sliding_window - 1
    return reach, 0 if causal else reach


def _refuse(options: dict[str, Any]) -> None:
    for name in ("position_bias", "softcap", "s_aux"):
        if options.get(name) is not None:
            raise CannotPackError(f"its attention has {name}")


def flash_attention(
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
    """Compute attention within segments: query, key and value [1, heads, tokens, d] to [1, tokens, heads, d]."""
    from torch.nn.attention.varlen import varlen_attn

    del attention_mask
    _refuse(options)
    bounds, longest = options["cu_seq_lens_q"], options["max_length_q"]
    query, key, value = (states[0].transpose(0, 1) for states in (query, key, value))
    rows = varlen_attn(
        query,
        key,
        value,
        bounds,
        bounds,
        longest,
        longest,
        scale=scaling,
        window_size=_window(module, sliding_window=sliding_window, is_causal=is_causal),
        enable_gqa=query.shape[1] != key.shape[1],
    )
    assert isinstance(rows, Tensor)  # noqa: S101  (a tuple only with return_aux)
    return rows[None], None


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
    _refuse(options)
    left, right = _window(module, sliding_window=sliding_window, is_causal=is_causal)
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


AttentionInterface.register(FLASH, flash_attention)
AttentionInterface.register(ONE_BY_ONE, one_by_one_attention)
