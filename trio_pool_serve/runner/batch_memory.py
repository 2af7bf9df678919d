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
    ``OutOfDeviceMemoryError``. The rows ask for all ``params``, and are as long as they can be within the budget, up to
    ``max_tokens``, or as many. Blocks. Raises ``ModelLoadError`` if not even ``MIN_TOKENS`` fit.
    """
    budget = wanted
    while True:
        try:
            for length in (min(max_tokens, budget), min(SHORT, budget)):
                batch = full_batch(budget, length, params)
                compute((batch, batch))
        except OutOfDeviceMemoryError as error:
            reason = str(error)  # the error's traceback refers to the tensors of batches before
        else:
            break
        if budget < 2 * MIN_TOKENS:
            raise ModelLoadError(f"The device has too little free memory for a batch of {budget} tokens: {reason}")
        budget //= 2
    if max_tokens > budget:  # longer rows are batches by themselves
        try:
            compute([full_batch(max_tokens, max_tokens, params)])
        except OutOfDeviceMemoryError:
            logger.warning("an input of %d tokens, the longest, does not fit into the device's memory", max_tokens)
    if budget < wanted:
        logger.warning("batches have %d tokens, not %d: more do not fit into the device's memory", budget, wanted)
    return budget


def full_batch(budget: int, length: int, params: tuple[PoolingParams, ...]) -> Batch:
    """Return a batch of about ``budget`` tokens: rows of ``length``, the last one shorter."""
    lengths = [length] * (budget // length) + [budget % length] * (budget % length > 0)
    lengths[-1] = max(1, lengths[-1] - 1)  # of unequal lengths, since equal rows have no mask, which takes memory
    return Batch(tuple(PoolingRequest(RenderedPrompt(np.ones(each, dtype=np.int32)), params) for each in lengths))
