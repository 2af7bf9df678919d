"""Batches of random token ids, of lengths as a server's queue would put them together."""

from collections.abc import Iterable, Sequence
from itertools import cycle, islice

import numpy as np

from benchmarks.bert_shapes import MAX_TOKENS
from trio_pool_serve.engine.batching import FREE_PADDING_DIVISOR, BatchBudget
from trio_pool_serve.runner.device_memory import SHORT as SHORTEST
from trio_pool_serve.types import Batch, Embed, PoolingParams, PoolingRequest, RenderedPrompt, TokenEmbed

IDS = (1000, 30000)
"""Between which all ids are those of words."""

SHORT = 16


def make_batch(lengths: Sequence[int], params: Iterable[PoolingParams]) -> Batch:
    """Return rows of ``lengths`` tokens; ``params`` take turns."""
    random = np.random.default_rng(0)
    turns = cycle(params)
    rows = (random.integers(*IDS, size=length).astype(np.int32) for length in lengths)
    return Batch(tuple(PoolingRequest(RenderedPrompt(row), (next(turns),)) for row in rows))


def fill(lengths: Iterable[int], max_tokens: int, *, pads: bool) -> list[int]:
    """Return as many of ``lengths``, which may not end, as the queue puts into a batch of ``max_tokens``."""
    budget = BatchBudget(max_tokens, free_padding=max_tokens // FREE_PADDING_DIVISOR, pads=pads)
    taken: list[int] = []
    for length in lengths:
        if not budget.try_add(length):
            return taken
        taken.append(length)
    return taken


def full_batches(max_tokens: int, *, pads: bool) -> dict[str, list[int]]:
    """Return the lengths of batches that use up the token budget, by what they are.

    The first two are those with which the budget was tried when the model was loaded.
    """
    return {
        f"rows of {MAX_TOKENS} tokens": fill(cycle([MAX_TOKENS]), max_tokens, pads=pads),
        f"rows of {SHORTEST} tokens": fill(cycle([SHORTEST]), max_tokens, pads=pads),
        f"rows of {SHORT} tokens": fill(cycle([SHORT]), max_tokens, pads=pads),
        f"one row of {MAX_TOKENS} tokens, the others of {SHORT}": fill(
            (MAX_TOKENS if index == 0 else SHORT for index in range(max_tokens)), max_tokens, pads=pads
        ),
        "rows of all lengths, longest first": fill(
            (max(1, MAX_TOKENS - index) for index in range(max_tokens)), max_tokens, pads=pads
        ),
    }


def mixed_batches(max_tokens: int) -> list[Batch]:
    """Return batches of every kind that a runner treats differently: few rows and many, short, long, and mixed."""
    both: tuple[PoolingParams, ...] = (Embed(), TokenEmbed(), Embed(dimensions=32, normalize=False))
    some = list(islice(cycle([3, 512, 40, 7, 129]), 30))
    return [
        make_batch([8], (Embed(),)),
        make_batch([33, 5, 17], both),
        make_batch([128] * 16, (Embed(),)),
        make_batch(some, both),
        make_batch([SHORT] * (max_tokens // SHORT), (Embed(),)),
        make_batch([MAX_TOKENS] * max(1, max_tokens // MAX_TOKENS), (TokenEmbed(),)),
    ]
