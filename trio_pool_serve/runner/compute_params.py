"""What a computation is chosen for."""

from collections.abc import Callable, Sequence

import torch
from attrs import frozen

from trio_pool_serve.types import RenderedPrompt


@frozen(eq=False)
class SamplePrompts:
    """Prompts to quantise a model with, and others to compare its output on."""

    calibration: Sequence[RenderedPrompt]
    held_out: Sequence[RenderedPrompt]


@frozen(kw_only=True, eq=False)
class ComputeParams:
    """Device, dtype, and the rows: at most ``max_tokens`` tokens each, padded with ``pad_token_id``.

    At most ``concurrent_launches`` batches are computed at a time here, and ``cores_shared_by`` on these cores, other
    processes included. ``sample_prompts`` blocks, as it loads the tokenizer. ``may_time``
    is false while other models compute on these cores: then two computations cannot be compared by their times.
    """

    device: torch.device
    dtype: torch.dtype
    pad_token_id: int
    max_tokens: int
    concurrent_launches: int = 1
    cores_shared_by: int = 1
    may_time: bool = True
    sample_prompts: Callable[[], SamplePrompts] = lambda: SamplePrompts((), ())
