"""Attention masks made without reading the tensors that they are made of.

transformers checks whether a mask masks anything, because attention is faster without one. On a GPU the check waits for
everything launched before, so that no batch could be launched while another is computed. Without a mask it checks
whether positions begin again somewhere (packed rows), which waits as well.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import eager_mask, sdpa_mask

SDPA = "trio_pool_serve_sdpa"

EAGER = "trio_pool_serve_eager"
"""For models that take masks from transformers, but no attention function."""


def without_mask_skips(make_mask: Callable[..., Tensor | None]) -> Callable[..., Tensor | None]:
    """Return ``make_mask`` with the options switched off that let it make no mask."""

    def mask(**options: Any) -> Tensor | None:
        options |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        return make_mask(**options)

    return mask


AttentionInterface.register(SDPA, sdpa_attention_forward)
AttentionMaskInterface.register(SDPA, without_mask_skips(sdpa_mask))
AttentionMaskInterface.register(EAGER, without_mask_skips(eager_mask))


def skip_mask_checks(model: nn.Module) -> None:
    """Make a model skip the checks if its masks are transformers' and its attention is ``sdpa`` or its own code."""
    config: Any = model.config
    name = config._attn_implementation  # noqa: SLF001  (transformers' setter downloads kernels for some names)
    if name == "sdpa":
        config._attn_implementation = SDPA  # noqa: SLF001
    elif name == "eager" and not model._can_set_attn_implementation():  # type: ignore[operator]  # noqa: SLF001
        config._attn_implementation = EAGER  # noqa: SLF001
