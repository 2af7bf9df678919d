"""The linear layers of a transformer's blocks in FP8: their weights take half of bfloat16's memory.

A weight has one scale for each output, and the inputs have one for each token, found when they are computed. So a
token's output does not depend on other tokens, and nothing has to be calibrated. All else stays in the model's dtype.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from trio_pool_serve.errors import require
from trio_pool_serve.runner.comparison import probe_rows, states_of
from trio_pool_serve.runner.loaded_model import Backbone, LoadingParams
from trio_pool_serve.types import RenderedPrompt

FP8 = torch.float8_e4m3fn

ALIGNMENT = 16
"""The numbers of inputs and outputs must be multiples of it for torch's kernels on GPUs."""

MIN_FP8_COSINE = 0.98
"""Smallest mean cosine of tokens' states with those before the layers were quantised, for random tokens."""


class Fp8Linear(nn.Linear):
    """A linear layer whose weight is in FP8. A layer becomes one in place: other modules keep their references to it.

    ``quantized`` is [out, in], ``scale`` [1, out] in float32, and ``dtype`` that of the weight before. On a CPU torch
    computes the same products, slowly.
    """

    quantized: Tensor
    scale: Tensor
    dtype: torch.dtype

    @staticmethod
    def convert(layer: Any) -> None:
        """Quantise a linear layer, which frees its weight."""
        quantized, scale = quantize(layer.weight)
        layer.dtype = layer.weight.dtype
        del layer.weight
        layer.__class__ = Fp8Linear
        layer.quantized = nn.Parameter(quantized, requires_grad=False)
        layer.register_buffer("scale", scale.T)

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """The weight that it computes with, for code that reads weights by themselves."""
        return (self.quantized.float() * self.scale.T).to(self.dtype)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the outputs [..., out] for inputs [..., in], in their dtype."""
        rows, scale = quantize(inputs.reshape(-1, self.in_features))
        outputs = torch._scaled_mm(  # noqa: SLF001  (torch 2.9 has no public form of it)
            rows,
            self.quantized.T,
            scale_a=scale,
            scale_b=self.scale,
            bias=self.bias,
            out_dtype=inputs.dtype,
            use_fast_accum=True,
        )
        return outputs.view(*inputs.shape[:-1], self.out_features)


def quantize(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows [rows, width] in FP8, and their scales [rows, 1] in float32."""
    rows = rows.float()
    scale = (rows.abs().amax(1, keepdim=True) / torch.finfo(FP8).max).clamp(min=1e-12)  # rows may be zeros
    return (rows / scale).to(FP8, memory_format=torch.contiguous_format), scale


def quantize_blocks(backbone: Backbone, params: LoadingParams) -> float:
    """Quantise the linear layers of a model's blocks one after the other, and return ``MIN_FP8_COSINE``'s cosine.

    Raises ``ModelLoadError`` if there are none, and if the cosine is smaller.
    """
    rows = probe_rows(backbone.vocab_size, [min(tokens, params.max_tokens) for tokens in (64, 12, 5)])
    # A classifier's few logits would tell little.
    hidden, prompts = Backbone(backbone.model.base_model), [*map(RenderedPrompt, rows)]
    states = partial(states_of, hidden, prompts, pad_token_id=params.pad_token_id, device=params.device)
    before = torch.cat(states())
    layers = {
        layer
        for blocks in backbone.model.modules()
        if isinstance(blocks, nn.ModuleList)
        for layer in blocks.modules()
        if type(layer) is nn.Linear and layer.in_features % ALIGNMENT == layer.out_features % ALIGNMENT == 0
    }
    require(bool(layers), "it has no blocks of linear layers")
    for layer in layers:
        Fp8Linear.convert(layer)
    cosine = float(nn.functional.cosine_similarity(before, torch.cat(states()), dim=-1).mean())
    require(
        cosine >= MIN_FP8_COSINE,
        f"its states differ too much from bfloat16's: cosine {cosine:.4f} on average, the minimum is {MIN_FP8_COSINE}",
    )
    return cosine
