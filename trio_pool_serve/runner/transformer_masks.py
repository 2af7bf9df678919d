"""Attention masks that are always made, where transformers would make none if it finds that none is needed.

Whether a mask is needed depends on the values of a tensor: reading them is a synchronisation with a GPU, and a constant
in a traced program.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import eager_mask, sdpa_mask

from trio_pool_serve.runner.forward_pass import ForwardPass

SDPA = "trio_pool_serve_sdpa"

EAGER = "trio_pool_serve_eager"
"""For models that take masks from transformers, but no attention function."""

NO_VMAP = {"use_vmap": False}
"""transformers' mask functions all work on whole tensors of indices. A tracer cannot follow ``torch.vmap``, which
transformers uses for masks that a model adds to its own (Gemma 3's); the caller checks whether the mask is the same."""

NO_SKIPS = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
"""Without these options, no mask is made where none is needed."""


def without_synchronisation(make_mask: Callable[..., Tensor | None]) -> Callable[..., Tensor | None]:
    """Return ``make_mask`` without mask skips, except within ``masks_of`` for rows without padding.

    Within ``traceable_masks``, the mask has something to attend to for every token. Padding that is farther from all
    tokens than a sliding window reaches attends to nothing. torch makes zeros of that, OpenVINO makes NaNs, which reach
    the tokens in the next layer.
    """

    def mask(**options: Any) -> Tensor | None:
        changed = {"attention_mask": None} if getattr(_rows, "are_unpadded", False) else NO_SKIPS
        made = make_mask(**options | NO_VMAP | changed)
        if made is not None and made.dtype == torch.bool and getattr(_rows, "are_traced", False):
            return made | ~made.any(dim=-1, keepdim=True)
        return made

    return mask


_rows = threading.local()


@contextmanager
def masks_of(forward: ForwardPass) -> Iterator[None]:
    """Within the block, models whose mask checks are skipped make no mask if none of the rows needs one.

    There is a faster kernel for that, and the mask of a row of 32,768 tokens takes a GiB.
    """
    _rows.are_unpadded = int(forward.attended.min()) == int(forward.lengths.max())
    try:
        yield
    finally:
        _rows.are_unpadded = False


AttentionInterface.register(SDPA, sdpa_attention_forward)
AttentionMaskInterface.register(SDPA, without_synchronisation(sdpa_mask))
AttentionMaskInterface.register(EAGER, without_synchronisation(eager_mask))


def skip_mask_checks(model: nn.Module) -> None:
    """Make a model skip the checks where its masks are transformers' and its attention is sdpa or its own code.

    Parts of a model, such as its towers, have configs of their own.
    """
    for part in model.modules():
        if not isinstance(part, PreTrainedModel):
            continue
        config: Any = part.config
        name = config._attn_implementation  # noqa: SLF001  (transformers' setter downloads kernels for some names)
        if name == "sdpa":
            config._attn_implementation = SDPA  # noqa: SLF001
        elif name == "eager" and not part._can_set_attn_implementation():  # noqa: SLF001
            config._attn_implementation = EAGER  # noqa: SLF001


@contextmanager
def traceable_masks(model: nn.Module) -> Iterator[None]:
    """Make a model skip the checks within the block, with masks that OpenVINO can compute."""
    config: Any = model.config
    name = config._attn_implementation  # noqa: SLF001
    skip_mask_checks(model)
    _rows.are_traced = True
    try:
        yield
    finally:
        _rows.are_traced = False
        config._attn_implementation = name  # noqa: SLF001
