"""Short trials of speed: which of two computations of a model is faster, and how many batches at a time are best."""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from attrs import frozen

from trio_pool_serve.types import Batch, PoolingParams, PoolingRequest, RenderedPrompt

Compute = Callable[[Batch], object]

ROWS, TOKENS = (1, 8), 32
"""The batches that are timed: a query alone, and some queries."""

MOST_ROUNDS, LEAST_ROUNDS, MOST_S = 10, 3, 0.25
"""Rounds in which each batch is timed, and seconds for all: a large model's batch takes seconds."""

STEADY = 1.5
"""Maximum ratio of the median of a computation's times to the best on an idle machine."""

MOST_AT_ONCE = 16
"""Batches at a time. Each further thread that waits for rows takes the event loop 10 to 25 µs more for a request."""

ROWS_PER_CORE = 2
"""Rows of a trial that are computed at a time: in the smaller batches, the more of these there are, as under load."""

WARM_UP_S, MEASURED_S = 0.1, 0.3

CLEAR, QUIET = 1.1, 1.2
"""A number is clearly faster with at least ``CLEAR`` times the rows/s. Other programs compute if the two rates of a
number differ by more than ``QUIET`` times."""


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
        rows = np.random.default_rng(0).integers(vocab_size, size=(count, min(TOKENS, max_tokens)), dtype=np.int32)
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


@frozen
class BatchesTrial:
    """How many batches at a time a trial has chosen, and in words why."""

    batches: int
    what: str


def try_batches(rows_per_s: Callable[[int], float], cores: int, default: int) -> BatchesTrial | None:
    """Return the smallest number of batches at a time than which no other is clearly faster.

    ``rows_per_s`` measures each number twice: the default, its doubles, and one per core, up to ``MOST_AT_ONCE``.
    ``None`` if other programs compute meanwhile.
    """
    most = min(cores, MOST_AT_ONCE)
    numbers = sorted({most, *(default << n for n in range(most.bit_length()) if default << n < most)})
    rates = np.array([[rows_per_s(number) for number in numbers] for _ in range(2)])
    best = rates.max(0)
    if (best > QUIET * rates.min(0)).any():
        return None
    gain = best / best[0]
    chosen = int(np.argmax(CLEAR * gain >= gain.max()))
    batches, threads = numbers[chosen], cores // numbers[chosen]
    by = f"{gain[chosen]:.2f}" if chosen else f"more batches reach at most {gain.max():.2f}"
    why = f"{by} times the rows/s of {default} × {cores // default}"
    return BatchesTrial(batches, f"{batches} batches at a time with {threads} thread{'s'[threads == 1 :]} each: {why}")


def rows_per_s(launch: Compute, request: PoolingRequest, batches: int, cores: int) -> float:
    """Return the rows/s of ``batches`` threads that launch at the same time. Blocks for half a second or two passes."""
    batch = Batch((request,) * max(1, ROWS_PER_CORE * cores // batches))

    def launch_again(_: int) -> float:
        for seconds in (WARM_UP_S, MEASURED_S):
            launched, began = 0, time.perf_counter()
            while (took := time.perf_counter() - began) < seconds:
                launch(batch)
                launched += 1
        return launched * len(batch.requests) / took

    with ThreadPoolExecutor(batches) as threads:
        return sum(threads.map(launch_again, range(batches)))
