"""Masks made without looking at what they mask.

transformers looks whether a mask masks anything, for attention is faster without. On a GPU that waits for everything
launched before, so that no batch could be launched while another is computed. Without a mask it looks whether
positions begin anew somewhere, which waits as well.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import eager_mask, sdpa_mask

SDPA = "trio_pool_serve_sdpa"

EAGER = "trio_pool_serve_eager"
"""For models that ask transformers for a mask, but not for an attention function."""


def unread(make_mask: Callable[..., Tensor | None]) -> Callable[..., Tensor | None]:
    """Return ``make_mask``, but for its leave to make none."""

    def mask(**options: Any) -> Tensor | None:
        options |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        return make_mask(**options)

    return mask


AttentionInterface.register(SDPA, sdpa_attention_forward)
AttentionMaskInterface.register(SDPA, unread(sdpa_mask))
AttentionMaskInterface.register(EAGER, unread(eager_mask))


def skip_mask_checks(model: nn.Module) -> None:
    """Have a model make its masks so, if it gets them from transformers and computes by ``sdpa`` or all by itself."""
    config: Any = model.config
    asked = config._attn_implementation  # noqa: SLF001  (transformers' setter downloads kernels for some names)
    if asked == "sdpa":
        config._attn_implementation = SDPA  # noqa: SLF001
    elif asked == "eager" and not model._can_set_attn_implementation():  # type: ignore[operator]  # noqa: SLF001
        config._attn_implementation = EAGER  # noqa: SLF001
