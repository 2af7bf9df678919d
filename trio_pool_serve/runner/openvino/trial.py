"""A short trial of speed: which of two computations of a model is faster."""

import time
from collections.abc import Callable, Sequence

import numpy as np
from attrs import frozen

from trio_pool_serve.runner.probe import probe_rows
from trio_pool_serve.types import Batch, PoolingParams, PoolingRequest, RenderedPrompt

Compute = Callable[[Batch], object]

ROWS, TOKENS = (1, 8), 32
"""The batches that are timed: a query alone, and some queries."""

MOST_ROUNDS, LEAST_ROUNDS, MOST_S = 10, 3, 0.25
"""Each batch is timed so often, for so long at most: a large model's batch takes seconds."""

STEADY = 1.5
"""On an idle machine the median of a computation's times is at most so many times its best."""


@frozen
class Trial:
    """The challenger's time as a part of the incumbent's, and whether nothing else used the cores meanwhile."""

    ratio: float
    is_steady: bool


def try_speed(
    challenger: Compute, incumbent: Compute, *, params: PoolingParams, vocab_size: int, max_tokens: int
) -> Trial:
    """Return the challenger's time as a part of the incumbent's, the geometric mean of all batches.

    Both are timed in turns, and the best time of each counts. Blocks for about a second at most, unless a single
    batch takes longer.
    """
    trials = []
    for count in ROWS:
        rows = probe_rows(vocab_size, [min(TOKENS, max_tokens)] * count)
        batch = Batch(tuple(PoolingRequest(RenderedPrompt(row), (params,)) for row in rows))
        trials.append(_try([challenger, incumbent], batch))
    ratio = float(np.exp(np.mean([np.log(trial.ratio) for trial in trials])))
    return Trial(ratio, all(trial.is_steady for trial in trials))


def _try(computations: Sequence[Compute], batch: Batch) -> Trial:
    began = time.perf_counter()
    for compute in computations:
        compute(batch)  # the first pass allocates
    times: list[list[float]] = []
    while len(times) < LEAST_ROUNDS or (len(times) < MOST_ROUNDS and time.perf_counter() - began < MOST_S):
        times.append([_seconds(compute, batch) for compute in computations])
    ours, theirs = np.min(times, axis=0)
    return Trial(float(ours / theirs), bool((np.median(times, axis=0) <= STEADY * np.min(times, axis=0)).all()))


def _seconds(compute: Compute, batch: Batch) -> float:
    """Return the time of the second of two passes: during the first, the other computation's threads still spin."""
    compute(batch)
    began = time.perf_counter()
    compute(batch)
    return time.perf_counter() - began
