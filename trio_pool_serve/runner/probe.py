"""The comparison of two computations of one model on random token ids."""

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from trio_pool_serve.runner.forward_pass import Compute, ForwardPass
from trio_pool_serve.runner.loaded_model import Backbone
from trio_pool_serve.runner.torch_device import to_device
from trio_pool_serve.types import PoolingRequest, RenderedPrompt, TokenIds

TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 0.03, torch.float16: 0.01}
"""Largest relative difference of a row's output between computations that round differently. bfloat16 alone accounts
for a third of its own."""


def probe_rows(vocab_size: int, lengths: Sequence[int]) -> list[TokenIds]:
    """Return rows of random ids, the same on each call."""
    random = np.random.default_rng(0)
    return [random.integers(vocab_size, size=length).astype(np.int32) for length in lengths]


def as_embeds(backbone: Backbone, rows: Sequence[TokenIds], device: torch.device) -> list[RenderedPrompt]:
    """Return rows as prompts of token embeddings: the model's own of their ids."""
    embeds = [backbone.embed(to_device(row.astype(np.int64), device)).float().cpu().numpy() for row in rows]
    return [RenderedPrompt(np.zeros(len(each), np.int32), embeds=each) for each in embeds]


def states_of(
    compute: Compute, prompts: Sequence[RenderedPrompt], *, pad_token_id: int, device: torch.device
) -> list[Tensor]:
    """Return the states of each prompt in float32, [tokens, width], without padding."""
    with torch.inference_mode():
        states = compute(ForwardPass([PoolingRequest(prompt) for prompt in prompts], pad_token_id, device))
        return list(torch.split(states.at(states.cells).float(), states.lengths.tolist()))


def accepts_embeds(
    compute: Compute,
    backbone: Backbone,
    rows: Sequence[TokenIds],
    tolerance: float,
    *,
    pad_token_id: int,
    device: torch.device,
) -> bool:
    """Return whether ``compute`` makes of the token embeddings of rows what ``backbone`` makes of their ids.

    Some models use the ids for more.
    """
    states = partial(states_of, pad_token_id=pad_token_id, device=device)
    expected = states(backbone, [*map(RenderedPrompt, rows)])
    try:
        return difference(states(compute, as_embeds(backbone, rows, device)), expected) <= tolerance
    except (RuntimeError, ValueError, TypeError, AttributeError):
        return False


def difference(ours: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Return the largest relative difference of all rows; NaN if there is one in any."""
    return float(torch.stack([(a - b).norm() / b.norm() for a, b in zip(ours, expected, strict=True)]).max())
