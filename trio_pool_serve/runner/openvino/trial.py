"""A short trial of speed: which of two computations of a model is faster."""

import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from trio_pool_serve.runner.forward_pass import ForwardPass, PaddedCompute
from trio_pool_serve.runner.probe import probe_rows
from trio_pool_serve.types import PoolingRequest, RenderedPrompt

ROWS, TOKENS = (1, 8), 32
"""The batches that are timed: a query alone, and some queries."""

MOST_ROUNDS, LEAST_ROUNDS, MOST_S = 10, 2, 1.0
"""Each batch is timed so often, for so long at most: a large model's batch takes seconds."""

MAX_RATIO = 0.9
"""The challenger is the faster one if it takes at most this part of the time. Repeated trials of one model on an idle
machine differ by less than 5 %."""


@torch.inference_mode()
def time_ratio(
    challenger: PaddedCompute, incumbent: PaddedCompute, *, vocab_size: int, max_tokens: int, pad_token_id: int
) -> float:
    """Return the challenger's time as a part of the incumbent's, the geometric mean of all batches.

    Both are timed in turns, and the best time of each counts. Blocks for two to four seconds at most, unless a single
    batch takes longer.
    """
    ratios = []
    for count in ROWS:
        rows = probe_rows(vocab_size, [min(TOKENS, max_tokens)] * count)
        requests = [PoolingRequest(RenderedPrompt(row)) for row in rows]
        forward = ForwardPass(requests, torch.device("cpu"), pad_token_id)
        ratios.append(_ratio([challenger, incumbent], forward))
    return float(np.exp(np.mean(np.log(ratios))))


def _ratio(computations: Sequence[PaddedCompute], forward: ForwardPass) -> float:
    began = time.perf_counter()
    for compute in computations:
        compute(forward)  # the first pass allocates
    times: list[list[float]] = []
    while len(times) < LEAST_ROUNDS or (len(times) < MOST_ROUNDS and time.perf_counter() - began < MOST_S):
        times.append([_seconds(compute, forward) for compute in computations])
    ours, theirs = np.min(times, axis=0)
    return float(ours / theirs)


def _seconds(compute: PaddedCompute, forward: ForwardPass) -> float:
    """Return the time of the second of two passes: during the first, the other computation's threads still spin."""
    compute(forward)
    began = time.perf_counter()
    compute(forward)
    return time.perf_counter() - began


def machine_name(threads: int) -> str:
    """Return what a trial's result depends on: the CPU's model name and the number of threads."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return f"{next(names, 'unknown CPU')}, {threads} threads"
