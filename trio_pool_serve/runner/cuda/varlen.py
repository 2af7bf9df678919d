"""Attention over packed rows, registered with transformers: each row attends to itself alone.

transformers looks attention functions up by name, and passes them the keyword arguments of the model's call, under the
names that its own flash attention uses. For a name without a mask function it makes no mask.
"""

import inspect
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import attention
from transformers import AttentionInterface

try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:
    FLASH_PARAMETERS: frozenset[str] = frozenset()
else:
    FLASH_PARAMETERS = frozenset(inspect.signature(varlen_attn).parameters)
"""The parameter names of torch's variable-length attention; none if torch has no such function."""

VARLEN = "trio_pool_serve_varlen"
"""Attention within segments: torch's variable-length flash attention on CUDA, in half precision; row by row on CPU."""


FlashKernel: TypeAlias = Literal["FA3", "FA4"]

FASTER_KERNELS: Mapping[int, Sequence[FlashKernel]] = {9: ("FA3", "FA4"), 10: ("FA4",)}
"""What torch can call besides its own kernel, by compute capability: packages flash-attn-3 and flash-attn-4."""


class CannotPackError(Exception):
    """A model cannot be computed packed; the message is the reason in a few words, for the log."""


def has_flash() -> bool:
    """Return whether this version of torch has variable-length attention with windows, as 2.11 and later."""
    return {"scale", "window_size"} <= FLASH_PARAMETERS


def faster_kernels(device: torch.device) -> Sequence[FlashKernel]:
    """Return the kernels that a device may have besides FA2, the fastest first; their packages may be missing."""
    if device.type == "cpu" or not hasattr(attention, "activate_flash_attention_impl"):  # torch 2.11 has it
        return ()
    major, _ = torch.get_device_module(device).get_device_capability(device)
    return FASTER_KERNELS.get(major, ())


def window_of(module: nn.Module, *, sliding_window: int | None, is_causal: bool | None) -> tuple[int, int]:
    """Return how many tokens to its left and to its right a token attends to, −1 for all."""
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    reach = -1 if sliding_window is None else sliding_window - 1
    return reach, 0 if causal else reach


@torch.library.custom_op("trio_pool_serve::attend_by_rows", mutates_args=(), device_types="cpu")
def attend_by_rows(
    query: Tensor, key: Tensor, value: Tensor, begins: Tensor, scale: float | None, left: int, right: int
) -> Tensor:
    """Compute attention row by row: query, key and value [tokens, heads, d] to [tokens, heads, d].

    Row i reaches from ``begins[i]`` to ``begins[i + 1]``; what belongs to no row is zero. ``left`` and ``right`` are as
    ``window_of`` returns them. It is an operator so that a compiler does not look inside, as at the kernels for CUDA.
    """
    output = torch.zeros_like(query, memory_format=torch.contiguous_format)
    is_causal = (left, right) == (-1, 0)
    for begin, end in pairwise(begins.tolist()):
        visible = None
        if left >= 0 or right > 0:
            places = torch.arange(end - begin)
            distance = places[None, :] - places[:, None]
            visible = ((distance >= -left) | (left < 0)) & ((distance <= right) | (right < 0))
        ours, keys, values = (states[begin:end].transpose(0, 1)[None] for states in (query, key, value))
        row = nn.functional.scaled_dot_product_attention(
            ours,
            keys,
            values,
            attn_mask=visible,
            is_causal=is_causal,
            scale=scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        output[begin:end] = row[0].transpose(0, 1)
    return output


@attend_by_rows.register_fake
def _(query: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(query, memory_format=torch.contiguous_format)


def attend_within_segments(
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
    """Compute attention within segments: query, key and value [1, heads, tokens, d] to [1, tokens, heads, d].

    Raises ``CannotPackError`` for options that change the result.
    """
    del attention_mask
    for name in ("position_bias", "softcap", "s_aux"):
        if options.get(name) is not None:
            raise CannotPackError(f"its attention has {name}")
    window = window_of(module, sliding_window=sliding_window, is_causal=is_causal)
    query, key, value = (states[0].transpose(0, 1) for states in (query, key, value))
    if query.device.type == "cpu":
        return attend_by_rows(query, key, value, options["cu_seq_lens_q"], scaling, *window)[None], None
    bounds, longest = options["cu_seq_lens_q"], options["max_length_q"]
    # torch 2.11 has no such parameter: its kernel always shares keys among queries.
    gqa: Any = {"enable_gqa": query.shape[1] != key.shape[1]} if "enable_gqa" in FLASH_PARAMETERS else {}
    rows = varlen_attn(
        query,
        key,
        value,
        bounds,
        bounds,
        longest,
        longest,
        scale=scaling,
        window_size=window,
        **gqa,
    )
    assert isinstance(rows, Tensor)  # noqa: S101  (a tuple only with return_aux)
    return rows[None], None


AttentionInterface.register(VARLEN, attend_within_segments)
