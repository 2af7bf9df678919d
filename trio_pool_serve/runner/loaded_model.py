"""What a kind of model's loader is given, and what it returns."""

from collections.abc import Mapping
from typing import Any

import torch
from attrs import frozen

from trio_pool_serve.runner.backbone import Backbone
from trio_pool_serve.runner.heads.head import Head


@frozen(kw_only=True)
class LoadingParams:
    """How to load: the device, the type to compute in, and whether the model may bring code of its own."""

    device: torch.device
    dtype: torch.dtype
    trust_remote_code: bool = False


@frozen(kw_only=True, eq=False)
class LoadedModel:
    """A model on its device, ready to compute.

    ``heads`` is what it can be asked for, by the class of the ``PoolingParams``. ``about`` says in a few words
    what its heads do. ``output_width`` is how many numbers the backbone gives per token, where that is so much
    more than a hidden state (a vocabulary) that batches have to be smaller.
    """

    backbone: Backbone
    heads: Mapping[type[Any], Head]
    about: str
    output_width: int = 0
