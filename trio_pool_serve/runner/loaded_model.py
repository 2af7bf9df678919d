"""Input and output of a kind of model's loader."""

from collections.abc import Mapping
from typing import Any

import torch
from attrs import frozen

from trio_pool_serve.runner.backbone import Backbone
from trio_pool_serve.runner.heads.head import Head


@frozen(kw_only=True)
class LoadingParams:
    """How to load: device, dtype, and whether code in the model's folder may be run."""

    device: torch.device
    dtype: torch.dtype
    trust_remote_code: bool = False


@frozen(kw_only=True, eq=False)
class LoadedModel:
    """A model on its device, ready to compute.

    ``heads`` are by the class of the ``PoolingParams`` that they serve. ``description`` describes the heads for the log.
    ``output_width`` is the width of the backbone's output per token if it is much larger than a hidden state (logits
    over a vocabulary), so that batches have to be smaller; else 0.
    """

    backbone: Backbone
    heads: Mapping[type[Any], Head]
    description: str
    output_width: int = 0
