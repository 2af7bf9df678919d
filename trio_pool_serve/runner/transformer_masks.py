"""Attention masks that transformers always makes, in place of none where it finds that none is needed.

Whether one is needed depends on the values of a tensor: to look is a synchronisation with a GPU, and a constant in a
traced program.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
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


@contextmanager
def with_masks_always(model: nn.Module) -> Iterator[None]:
    """Make a model skip the checks within the block."""
    config: Any = model.config
    name = config._attn_implementation  # noqa: SLF001
    skip_mask_checks(model)
    try:
        yield
    finally:
        config._attn_implementation = name  # noqa: SLF001
