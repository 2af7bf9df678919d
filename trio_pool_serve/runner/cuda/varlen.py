"""Attention over packed rows, registered with transformers: each row attends to itself alone.

transformers looks attention functions up by name, and passes them the keyword arguments of the model's call, under the
names that its own flash attention uses. For a name without a mask function it makes no mask.
"""

import inspect
from collections.abc import Set as AbstractSet
from functools import cache
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface

FLASH = "trio_pool_serve_varlen"
"""torch's variable-length flash attention, on CUDA in half precision."""


class CannotPackError(Exception):
    """A model cannot be computed packed; the message is the reason in a few words, for the log."""


def has_flash() -> bool:
    """Return whether this version of torch has variable-length attention with windows, as 2.11 and later."""
    return {"scale", "window_size"} <= _flash_parameters()


@cache
def _flash_parameters() -> AbstractSet[str]:
    """Return the parameter names of torch's variable-length attention; none if torch has no such function."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return frozenset()
    return inspect.signature(varlen_attn).parameters.keys()


def window_of(module: nn.Module, *, sliding_window: int | None, is_causal: bool | None) -> tuple[int, int]:
    """Return how many tokens to its left and to its right a token attends to, −1 for all."""
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    reach = -1 if sliding_window is None else sliding_window - 1
    return reach, 0 if causal else reach


def refuse_unknown(options: dict[str, Any]) -> None:
    """Raise ``CannotPackError`` for options of a model's attention that change its result."""
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
    refuse_unknown(options)
    bounds, longest = options["cu_seq_lens_q"], options["max_length_q"]
    query, key, value = (states[0].transpose(0, 1) for states in (query, key, value))
    # torch 2.11 has no such parameter: its kernel always shares keys among queries.
    gqa: Any = {"enable_gqa": query.shape[1] != key.shape[1]} if "enable_gqa" in _flash_parameters() else {}
    rows = varlen_attn(
        query,
        key,
        value,
        bounds,
        bounds,
        longest,
        longest,
        scale=scaling,
        window_size=window_of(module, sliding_window=sliding_window, is_causal=is_causal),
        **gqa,
    )
    assert isinstance(rows, Tensor)  # noqa: S101  (a tuple only with return_aux)
    return rows[None], None


AttentionInterface.register(FLASH, flash_attention)
