"""Sparse vectors from weights of tokens, in NumPy."""

from collections.abc import Collection

import numpy as np
import numpy.typing as npt

from trio_pool_serve.types import RenderedPrompt, SparseVector


def greatest_of_tokens(
    prompt: RenderedPrompt,
    of_tokens: npt.NDArray[np.float32],
    *,
    max_active_dims: int | None = None,
    unused: Collection[int] = (),
) -> SparseVector:
    """Return the greatest weight of each token id that is attended to, and of these the ``max_active_dims`` greatest.

    ``of_tokens`` has a weight for each token. Token ids in ``unused`` have none.
    """
    ids, of_tokens = prompt.token_ids[: prompt.attended], of_tokens[: len(prompt.token_ids)][: prompt.attended]
    indices, first, places = np.unique(ids, return_index=True, return_inverse=True)
    weights = of_tokens[first]
    np.maximum.at(weights, places, of_tokens)
    weights[np.isin(indices, list(unused))] = 0.0
    (nonzero,) = np.nonzero(weights)
    if max_active_dims is not None and len(nonzero) > max_active_dims:
        nonzero = np.sort(nonzero[np.argsort(-np.abs(weights[nonzero]), kind="stable")[:max_active_dims]])
    return SparseVector(indices[nonzero], weights[nonzero])
