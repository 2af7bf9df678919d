"""The conversion of a backbone from torch to OpenVINO, with any number of rows and tokens."""

import copy
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import openvino as ov
import torch
from openvino.tools.ovc import convert_impl
from torch import Tensor, nn

from trio_pool_serve.runner.backbone import Backbone
from trio_pool_serve.runner.transformer_masks import traceable_masks

# It would set the root logger's level for a conversion: what other threads log meanwhile would be lost.
convert_impl.init_logger = lambda *_: None

INPUTS = ("input_ids", "attention_mask", "token_type_ids")
"""Names of the converted model's inputs, int64 [rows, tokens]; the last one only if the model has segments."""

TRACED_ROWS, TRACED_TOKENS = 2, 7
"""Shape of the example. Not 1, which is broadcast, and numbers that no configuration has."""


class _OfIds(nn.Module):
    """``Backbone.forward_ids`` as a module, for the converter."""

    def __init__(self, backbone: Backbone) -> None:
        super().__init__()
        self.model = backbone.model
        self._forward = backbone.forward_ids

    def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor | None = None) -> Tensor:
        return self._forward(input_ids, attention_mask, token_type_ids)  # type: ignore[arg-type]  # without segments


def convert(backbone: Backbone) -> ov.Model:
    """Return a backbone in float32 as an OpenVINO model whose output is the backbone's.

    The model may use the memory of the backbone's weights. Blocks for seconds. Raises what the converter raises: any
    ``Exception``.
    """
    names = INPUTS if backbone.takes_type_ids else INPUTS[:2]
    ids = torch.arange(3, 3 + TRACED_ROWS * TRACED_TOKENS).view(TRACED_ROWS, TRACED_TOKENS)
    mask = torch.ones_like(ids)
    mask[-1, TRACED_TOKENS // 2 :] = 0
    example = dict(zip(INPUTS, (ids, mask, torch.zeros_like(ids)), strict=True))
    module = _OfIds(backbone)
    with traceable_masks(backbone.model), quiet(), torch.no_grad():
        model: ov.Model = ov.convert_model(
            module.eval(),
            example_input={name: example[name] for name in names},
            input=[(name, ov.PartialShape([-1, -1]), ov.Type.i64) for name in names],
        )
    return model


@contextmanager
def in_float32(backbone: Backbone) -> Iterator[Backbone]:
    """Yield the backbone in float32: itself, or a copy."""
    if next(backbone.model.parameters()).dtype == torch.float32:
        yield backbone
    else:
        yield Backbone(copy.deepcopy(backbone.model).float(), backbone.output)


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress warnings and messages of the libraries that convert.

    The tracer warns about sizes that it takes for constants: the comparison of outputs shows whether they matter. It
    also reads every property of the model, of which ``loss_function`` warns.
    """
    loggers: list[Any] = [logging.getLogger(name) for name in ("nncf", "openvino", "transformers")]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
