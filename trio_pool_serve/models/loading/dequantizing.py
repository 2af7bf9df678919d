"""Dequantising the weights of a checkpoint when it is loaded."""

from collections.abc import Mapping
from math import ceil

import torch
from torch import Tensor

from trio_pool_serve.errors import require
from trio_pool_serve.models.files.quantized_files import Quantization

SCALES = (".weight_scale_inv", ".weight_scale")
"""Ends of the name of a weight's scale, after its module. Both are factors: W = scale · stored."""

OF_ACTIVATIONS = (".input_scale", ".output_scale", ".k_scale", ".v_scale", ".q_scale")
"""Scales of activations, which are not quantised here."""


def dequantize(stored: Mapping[str, Tensor], quantization: Quantization, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return a checkpoint's weights in ``dtype``, computed in float32, without scales.

    Raises ``ModelLoadError`` for a weight without a scale, or with one that does not fit.
    """
    weights = {name: weight for name, weight in stored.items() if not name.endswith((*SCALES, *OF_ACTIVATIONS))}
    for name in (name for name in stored if name.endswith(SCALES)):
        of = f"{name.rpartition('.')[0]}.weight"
        require(of in weights and weights[of].ndim == 2, f"The checkpoint has {name}, but no matrix {of}.")
        weight, scale = stored[of], stored[name]
        require(
            scale.is_floating_point() and weight.is_floating_point() == quantization.is_float,
            f"{of} is in {weight.dtype} and {name} in {scale.dtype}, which is not {quantization.name}.",
        )
        weights[of] = (weight.float() * _factors(name, scale.float(), weight.shape, quantization)).to(dtype)
    for name, weight in weights.items():
        require(
            weight.itemsize > 1 or weight.dtype == torch.bool,
            f"{name} is stored in {weight.dtype}, and the checkpoint has no scale of it.",
        )
        require(
            not name.endswith(("_zero_point", "_packed", "_scale_inv", "_weight_scale")),
            f"The checkpoint has {name}, which cannot be dequantised.",
        )
    return weights


def _factors(name: str, scale: Tensor, shape: torch.Size, quantization: Quantization) -> Tensor:
    """Return a scale of a whole weight, of its rows, or of blocks so that it can be multiplied with it."""
    if scale.numel() == 1:
        return scale.reshape(())
    block = quantization.block
    if block is not None and scale.shape == tuple(map(ceil, (shape[0] / block[0], shape[1] / block[1]))):
        rows = scale.repeat_interleave(block[0], 0)[: shape[0]]
        return rows.repeat_interleave(block[1], 1)[:, : shape[1]]
    require(
        scale.shape in ((shape[0],), (shape[0], 1)),
        f"{name} is {list(scale.shape)} for a weight {list(shape)}, in blocks {block}.",
    )
    return scale.reshape(-1, 1)
