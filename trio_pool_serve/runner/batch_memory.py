"""The token budget of batches that a device's memory suffices for, found by computing full ones."""

import logging
from collections.abc import Callable, Sequence

import numpy as np

from trio_pool_serve.errors import ModelLoadError, OutOfDeviceMemoryError
from trio_pool_serve.types import Batch, PoolingParams, PoolingRequest, RenderedPrompt

logger = logging.getLogger(__name__)

SHORT = 2
"""Tokens of the rows of the batch with the most rows."""

MIN_TOKENS = 64
"""A model that cannot compute a batch of so many tokens cannot be served."""


def fit_budget(
    compute: Callable[[Sequence[Batch]], None], wanted: int, *, max_tokens: int, params: tuple[PoolingParams, ...]
) -> int:
    """Return the largest budget of ``wanted`` and its halves with which full batches fit into the device's memory.

    ``compute`` computes batches one after the other, without waiting for one before it launches the next, and raises
    ``OutOfDeviceMemoryError``. The rows ask for all ``params``, and are as long as they can be (``max_tokens``), or as
    many. Blocks. Raises ``ModelLoadError`` if not even ``MIN_TOKENS`` fit.
    """
    budget = wanted
    while True:
        try:
            for length in (min(max_tokens, budget), min(SHORT, budget)):
                batch = full_batch(budget, length, params)
                compute((batch, batch))
        except OutOfDeviceMemoryError as error:
            reason = error
        else:
            break
        if budget < 2 * MIN_TOKENS:
            raise ModelLoadError(f"The device has too little free memory for a batch of {budget} tokens: {reason}")
        budget //= 2
    if budget < wanted:
        logger.warning("batches have %d tokens, not %d: more do not fit into the device's memory", budget, wanted)
    return budget


def full_batch(budget: int, length: int, params: tuple[PoolingParams, ...]) -> Batch:
    """Return a batch of ``budget`` tokens, in rows of ``length``, and one of what is left."""
    lengths = [length] * (budget // length) + [budget % length] * (budget % length > 0)
    return Batch(tuple(PoolingRequest(RenderedPrompt(np.ones(each, dtype=np.int32)), params) for each in lengths))
