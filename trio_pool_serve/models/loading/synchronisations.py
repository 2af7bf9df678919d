"""Parts of transformers that wait for a GPU, replaced by ones that compute the same and do not.

Each makes a tensor of one number on the host and copies it to the device, for which the host waits until everything
that was launched before is done. Arithmetic takes such a tensor from the host as it is.
"""

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import masking_utils
from transformers.models.deberta_v2 import modeling_deberta_v2


def replace_synchronisations(model: nn.Module) -> None:
    """Replace what the model's code would wait in, for all models of the process."""
    # Whether images fit their placeholders, transformers would ask the device; the image formats have made sure of it.
    os.environ["TRANSFORMERS_DISABLE_TORCH_CHECK"] = "1"
    masking_utils.or_masks = or_masks
    if getattr(model.config, "model_type", None) == "deberta-v2":
        modeling_deberta_v2.make_log_bucket_position = log_bucket_position


def or_masks(*mask_functions: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return the union of mask functions, as transformers' function of this name; Gemma 3 passes a constant."""

    def union(*indices: Any) -> Tensor:
        made = mask_functions[0](*indices)
        for function in mask_functions[1:]:
            made = made | function(*indices)
        return made

    return union


def log_bucket_position(relative_pos: Tensor, bucket_size: int, max_position: int) -> Tensor:
    """Map distances to buckets: each its own up to half of ``bucket_size``, logarithmic beyond.

    He et al., https://arxiv.org/abs/2006.03654, and T5's buckets of relative positions, as DeBERTa V2 has them.
    """
    middle = bucket_size // 2
    distance = relative_pos.abs().clamp(min=middle - 1)
    half, longest = torch.tensor([middle, (max_position - 1) / middle], dtype=torch.float32)
    octaves = torch.log(distance / half) / torch.log(longest)
    far = torch.ceil(octaves * (middle - 1)) + middle
    return torch.where(distance <= middle, relative_pos.to(far.dtype), far * torch.sign(relative_pos))
