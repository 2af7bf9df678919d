"""Masks made without looking at what they mask.

For its ``sdpa`` attention transformers looks whether a mask masks anything, for attention is faster without. On a GPU
that waits for everything launched before, so that no batch could be launched while another is computed. Whether
anything is masked is known on the host here, and a mask that is handed over is meant.
"""

from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "trio_pool_serve_sdpa"


def unread_mask(
    *,
    attention_mask: Tensor | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    **options: Any,
) -> Tensor | None:
    """Return what ``sdpa_mask`` returns, but a mask wherever ``attention_mask`` is given."""
    unmasked = attention_mask is None
    mask: Tensor | None = sdpa_mask(
        attention_mask=attention_mask,
        allow_is_causal_skip=allow_is_causal_skip and unmasked,
        allow_is_bidirectional_skip=allow_is_bidirectional_skip and unmasked,
        **options,
    )
    return mask


AttentionInterface.register(NAME, sdpa_attention_forward)
AttentionMaskInterface.register(NAME, unread_mask)


def leave_masks_unread(model: nn.Module) -> None:
    """Have a model that computes by ``sdpa`` make its masks so; others stay as they are."""
    config: Any = model.config
    if config._attn_implementation == "sdpa":  # noqa: SLF001  (transformers' setter downloads kernels for some names)
        config._attn_implementation = NAME  # noqa: SLF001
