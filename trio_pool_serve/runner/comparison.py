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

TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 0.03, torch.float16: 0.01, torch.float8_e4m3fn: 0.2}
"""Largest relative difference of a row's output between computations that round differently. bfloat16 alone accounts
for a third of its own. In FP8 the smallest differences before a layer may be a whole step after it: two computations
are as near to each other as to bfloat16, which is 0.2 for the smallest cosine that is accepted, 0.98."""

ROUNDING = TOLERANCES | {torch.float32: 1e-5}
"""By how much a row's output may change with the rows beside it, relative to its length. Stated in docs/openvino.md."""


def probe_rows(vocab_size: int, lengths: Sequence[int]) -> list[TokenIds]:
    """Return rows of random ids, the same on each call."""
    random = np.random.default_rng(0)
    return [random.integers(vocab_size, size=length).astype(np.int32) for length in lengths]


def states_of(
    compute: Compute, prompts: Sequence[RenderedPrompt], *, pad_token_id: int, device: torch.device
) -> list[Tensor]:
    """Return the states of each prompt in float32, [tokens, width], without padding."""
    with torch.inference_mode():
        states = compute(ForwardPass([PoolingRequest(prompt) for prompt in prompts], pad_token_id, device))
        return list(torch.split(states.at(states.cells).float(), states.lengths.tolist()))


def masks_padding(
    backbone: Backbone,
    rows: Sequence[TokenIds],
    padded: Sequence[Tensor],
    *,
    pad_token_id: int,
    device: torch.device,
) -> bool:
    """Return whether the last of some rows has the same states alone as ``padded``, beside the others.

    ConvBERT and FNet do not mask padding, nor does MobileBERT, in which only the embedding of the padding token counts.
    In deep models rounding may exceed the bound; then other padding gives the same states.
    """
    states = partial(states_of, backbone, device=device)
    alone = states([RenderedPrompt(rows[-1])], pad_token_id=pad_token_id)
    if difference(alone, padded[-1:]) <= ROUNDING[next(backbone.model.parameters()).dtype]:
        return True
    return torch.equal(states([*map(RenderedPrompt, rows)], pad_token_id=int(rows[-1][-1]))[-1], padded[-1])


def accepts_embeds(
    compute: Compute,
    backbone: Backbone,
    rows: Sequence[TokenIds],
    expected: Sequence[Tensor],
    tolerance: float,
    *,
    pad_token_id: int,
    device: torch.device,
) -> bool:
    """Return whether ``compute`` makes of the token embeddings of rows the states that are expected of their ids.

    Some models use the ids for more.
    """
    try:
        embeds = [backbone.embed(to_device(row.astype(np.int64), device)).float().cpu().numpy() for row in rows]
        prompts = [RenderedPrompt(np.zeros(len(each), np.int32), embeds=each) for each in embeds]
        return difference(states_of(compute, prompts, pad_token_id=pad_token_id, device=device), expected) <= tolerance
    except (RuntimeError, ValueError, TypeError, AttributeError):
        return False


def tolerance_of(backbone: Backbone) -> float:
    """Return the tolerance for the least exact dtype of a model's weights."""
    return max(TOLERANCES.get(parameter.dtype, 0.0) for parameter in backbone.model.parameters())


def difference(ours: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Return the largest relative difference of all rows; NaN if there is one in any."""
    return float(torch.stack([(a - b).norm() / b.norm() for a, b in zip(ours, expected, strict=True)]).max())
