"""Whether a model is computed by OpenVINO, and its preparation."""

import logging
from importlib.util import find_spec

import numpy as np
import torch
from torch import Tensor

from trio_pool_serve.runner.backbone import Backbone
from trio_pool_serve.runner.probe import Compute, compute_rows, probe_rows

logger = logging.getLogger(__name__)

MIN_COSINE = {torch.float32: 0.99999, torch.bfloat16: 0.999}
"""Smallest cosine of a row's output with that of the backbone."""

PROBE_LENGTHS = (12, 5, 1)


class CannotUseOpenVinoError(Exception):
    """The model is not computed by OpenVINO; the message says why."""


def compile_backbone(
    backbone: Backbone, *, dtype: torch.dtype, pad_token_id: int, max_tokens: int, cores: int, streams: int
) -> Compute:
    """Return the backbone, converted and compiled.

    Blocks for seconds. Raises ``CannotUseOpenVinoError``.
    """
    if find_spec("openvino") is None:
        raise CannotUseOpenVinoError("it is not installed")
    if type(backbone) is not Backbone:
        raise CannotUseOpenVinoError("the model reads images")
    # Imported here: an optional dependency.
    from trio_pool_serve.runner.openvino.conversion import convert
    from trio_pool_serve.runner.openvino.openvino_backbone import PRECISIONS, OpenVinoBackbone

    if dtype not in PRECISIONS:
        raise CannotUseOpenVinoError(f"it is not used for {str(dtype).removeprefix('torch.')}")
    try:
        compiled = OpenVinoBackbone(backbone, convert(backbone), PRECISIONS[dtype], cores, streams)
        rows = probe_rows(backbone.vocab_size, [min(length, max_tokens) for length in PROBE_LENGTHS])
        ours, expected = (
            compute_rows(compute, rows, pad_token_id=pad_token_id, device=torch.device("cpu"))
            for compute in (compiled, backbone)
        )
    except Exception as error:
        raise CannotUseOpenVinoError(f"it fails: {repr(error).splitlines()[0][:200]}") from error
    cosine = min(_cosine(a, b) for a, b in zip(ours, expected, strict=True))
    if not cosine >= MIN_COSINE[dtype]:
        raise CannotUseOpenVinoError(f"its output differs: cosine {cosine:.5f}")
    return compiled


def _cosine(ours: Tensor, expected: Tensor) -> float:
    a, b = ours.double().flatten(), expected.double().flatten()
    return float(a @ b / np.sqrt(float(a @ a) * float(b @ b)))
