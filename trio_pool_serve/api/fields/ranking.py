"""Scores to a ranking, and the limits on it, for every dialect that reranks."""

import numpy as np
import numpy.typing as npt

from trio_pool_serve.errors import InvalidRequestError

Ranking = list[tuple[int, float]]
"""Indices and scores, best first."""


def ranked(scores: npt.NDArray[np.float32], top_n: int | None = None) -> Ranking:
    """Return the best ``top_n`` of scores, shape (documents,), best first; equal ones keep their order. 0 is all."""
    best = np.argsort(-scores, kind="stable")[: top_n or None]
    return list(zip(best.tolist(), scores[best].tolist(), strict=True))


def require_top(top_n: int | None, *, least: int = 0, param: str = "top_n") -> None:
    """Raise ``InvalidRequestError`` if fewer than ``least`` documents are wanted; more than there are is fine."""
    if top_n is not None and top_n < least:
        raise InvalidRequestError(f"{param} must be at least {least}, not {top_n}.", param=param)
