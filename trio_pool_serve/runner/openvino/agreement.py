"""How near two computations of one model are to each other: cosines of their outputs, row by row."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from attrs import frozen
from torch import Tensor

from trio_pool_serve.runner.backbone import Backbone
from trio_pool_serve.runner.forward_pass import ForwardPass, PaddedCompute
from trio_pool_serve.runner.heads.head import Head
from trio_pool_serve.runner.row_states import RowStates
from trio_pool_serve.types import Embed, PoolingRequest, RenderedPrompt, SparseEmbed

SHORT = ((33, 12, 5, 1),)
"""Lengths of the rows of a batch; none is that of the converter's example."""

LONG_COST = 1e11
"""Tokens times parameters of the longest row to compare on: about two seconds of torch on two cores."""

BEYOND_WINDOW = 40
"""Tokens of a row beyond the window of the model's sliding attention."""


@frozen
class Agreement:
    """The mean and the lowest of some rows' cosines."""

    mean: float
    lowest: float


def short_batches(backbone: Backbone, max_tokens: int) -> list[list[RenderedPrompt]]:
    """Return a batch of short rows of random tokens, the same on each call."""
    return _random_batches(backbone, [[min(length, max_tokens) for length in lengths] for lengths in SHORT])


def all_batches(backbone: Backbone, max_tokens: int) -> list[list[RenderedPrompt]]:
    """Return ``short_batches`` and one with a row that is as long as the model allows, or as time allows.

    Beside it is a short row, whose padding lies beyond the window of sliding attention.
    """
    affordable = max(64, int(LONG_COST / backbone.parameters), _window(backbone) + BEYOND_WINDOW)
    long = min(max_tokens, 1024, affordable)
    return [*short_batches(backbone, max_tokens), *_random_batches(backbone, [[long, min(3, max_tokens)]])]


def _window(backbone: Backbone) -> int:
    """Return the size of the window of the model's sliding attention, 0 if it has none."""
    config: Any = backbone.model.config
    text_config = config.get_text_config()
    return int(getattr(text_config, "sliding_window", None) or getattr(text_config, "local_attention", None) or 0)


def _random_batches(backbone: Backbone, lengths: Sequence[Sequence[int]]) -> list[list[RenderedPrompt]]:
    random = np.random.default_rng(0)
    config: Any = backbone.model.config
    segments = getattr(config, "type_vocab_size", 0) if backbone.takes_type_ids else 0

    def row(length: int) -> RenderedPrompt:
        ids = random.integers(backbone.vocab_size, size=length).astype(np.int32)
        types = np.sort(random.integers(segments, size=length)).astype(np.int32) if segments > 1 else None
        return RenderedPrompt(ids, type_ids=types)

    return [[row(length) for length in batch] for batch in lengths]


@torch.inference_mode()
def outputs(
    compute: PaddedCompute, prompts: Sequence[RenderedPrompt], *, pad_token_id: int, heads: Mapping[type[Any], Head]
) -> list[Tensor]:
    """Return a vector for each row: its own with a head for vectors, else its tokens' outputs after one another.

    For logits of whole rows there is one vector for all rows: a single row may have a single number.
    """
    forward = ForwardPass([PoolingRequest(prompt) for prompt in prompts], torch.device("cpu"), pad_token_id)
    states = compute(forward).float()
    for param in (Embed(), SparseEmbed()):
        if type(param) in heads:
            found = RowStates.of_output(states, forward.lengths)
            rows = heads[type(param)](forward.with_states(found), [param] * len(prompts))
            return list(rows.tensor.float())
    if states.dim() == 2:
        return [states.flatten()]
    return [row[: len(prompt.token_ids)].flatten() for row, prompt in zip(states, prompts, strict=True)]


def agreement(
    ours: PaddedCompute,
    expected: PaddedCompute,
    batches: Iterable[Sequence[RenderedPrompt]],
    *,
    pad_token_id: int,
    heads: Mapping[type[Any], Head] = {},
) -> Agreement:
    """Return the cosines of two computations' outputs. A NaN in any output makes both NaN."""
    cosines = np.array(list(_cosines(ours, expected, batches, pad_token_id, heads)))
    return Agreement(float(cosines.mean()), float(cosines.min()))


def _cosines(
    ours: PaddedCompute,
    expected: PaddedCompute,
    batches: Iterable[Sequence[RenderedPrompt]],
    pad_token_id: int,
    heads: Mapping[type[Any], Head],
) -> Iterator[float]:
    for batch in batches:
        of_ours, of_expected = (
            outputs(compute, batch, pad_token_id=pad_token_id, heads=heads) for compute in (ours, expected)
        )
        for row, wanted in zip(of_ours, of_expected, strict=True):
            a, b = row.double(), wanted.double()
            yield float(a @ b / (a.norm() * b.norm()))
