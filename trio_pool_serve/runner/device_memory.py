"""A device's memory: errors that mean that it does not suffice, and the token budget of batches that fit into it."""

import logging
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

from trio_pool_serve.errors import OutOfDeviceMemoryError, require
from trio_pool_serve.types import Batch, PoolingParams, PoolingRequest, RenderedPrompt

T = TypeVar("T")

MESSAGES = (
    "defaultcpuallocator:",  # torch on CPU: a RuntimeError
    "cuda error: out of memory",  # an AcceleratorError, of pinned memory; it leaves the context usable
    "cuda driver error: out of memory",  # of memory that is mapped piece by piece (expandable segments)
    "cublas_status_alloc_failed",  # of a thread's first multiplication
    "std::bad_alloc",  # oneDNN and OpenVINO
    "failed to allocate",  # OpenVINO: "Failed to allocate 6400000000 bytes of memory"
    "cannot allocate memory",  # of the C library
)
"""Parts of lower-case messages of torch, OpenVINO and C++ libraries, for errors that have no type of their own."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error, or one that led to it, means that memory did not suffice."""
    seen: BaseException | None = error
    while seen is not None:
        if {"MemoryError", "OutOfMemoryError"} & {kind.__name__ for kind in type(seen).__mro__}:  # Python's, torch's
            return True
        if isinstance(seen, RuntimeError) and any(message in str(seen).lower() for message in MESSAGES):
            return True
        seen = seen.__cause__ or seen.__context__  # a capture that ends because of it raises an error of its own
    return False


def computed_or_out_of_memory(compute: Callable[[], T], release: Callable[[], object] = lambda: None) -> T:
    """Return the result of ``compute``. Raises ``OutOfDeviceMemoryError`` if memory does not suffice for it.

    ``release``, which returns memory that is kept for later, is called before that is raised.
    """
    try:
        return compute()
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        reason = " ".join(str(error).split())
    # Here the error is gone, and with it what its traceback kept: the tensors of the pass.
    release()
    raise OutOfDeviceMemoryError(reason)


logger = logging.getLogger(__name__)

SHORT = 2
"""Tokens per row in the batch with the most rows."""

MIN_TOKENS = 64
"""A model that cannot compute a batch of this many tokens cannot be served."""


def fit_budget(
    compute: Callable[[Sequence[Batch]], None], wanted: int, *, max_tokens: int, params: tuple[PoolingParams, ...]
) -> int:
    """Return the largest budget, ``wanted`` or halved repeatedly, with which full batches fit into the device's memory.

    ``compute`` launches each batch without waiting for the one before, and raises ``OutOfDeviceMemoryError``. Two kinds
    of batches are tried: of the longest rows, up to ``max_tokens``, and of the most rows; all rows request all
    ``params``. Blocks. Raises ``ModelLoadError`` if not even ``MIN_TOKENS`` fit.
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
        require(
            budget >= 2 * MIN_TOKENS, f"The device has too little free memory for a batch of {budget} tokens: {reason}"
        )
        budget //= 2
    if max_tokens > budget:  # a longer row is a batch of its own
        try:
            compute([full_batch(max_tokens, max_tokens, params)])
        except OutOfDeviceMemoryError:
            logger.warning("the longest input, %d tokens, does not fit into the device's memory", max_tokens)
    if budget < wanted:
        logger.warning(
            "batches are limited to %d tokens instead of %d, which do not fit into the device's memory", budget, wanted
        )
    return budget


def full_batch(budget: int, length: int, params: tuple[PoolingParams, ...]) -> Batch:
    """Return a batch of about ``budget`` tokens: rows of ``length``, the last one shorter."""
    lengths = [length] * (budget // length) + [budget % length] * (budget % length > 0)
    lengths[-1] = max(1, lengths[-1] - 1)  # of unequal lengths, since equal rows have no mask, which takes memory
    return Batch(tuple(PoolingRequest(RenderedPrompt(np.ones(each, dtype=np.int32)), params) for each in lengths))
