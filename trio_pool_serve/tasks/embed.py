"""Texts to one vector each."""

import numpy as np

from trio_pool_serve.errors import InvalidRequestError
from trio_pool_serve.tasks.fan_out import ComputedRow
from trio_pool_serve.tasks.job import PoolJob, Task
from trio_pool_serve.tasks.model import Model
from trio_pool_serve.types import Embed, SparseVector, Vectors


def check_dimensions(model: Model, dimensions: int | None, *, param: str = "dimensions") -> None:
    """Raise ``InvalidRequestError``, which blames ``param``, unless the model's vectors can be cut to that size."""
    limit = model.engine.dimensions
    if dimensions is not None and not 1 <= dimensions <= limit:
        raise InvalidRequestError(f"{param} must be from 1 to {limit}, the model's own, not {dimensions}.", param=param)


def _params(model: Model, job: PoolJob) -> Embed:
    check_dimensions(model, job.dimensions)
    return Embed(dimensions=job.dimensions, normalize=job.normalize)


EMBED = Task("embed", _params)


def vector_of(row: ComputedRow, index: int = 0) -> Vectors:
    """Return the vector of a text, shape (dimensions,).

    That of a text read in several windows is their mean, each weighed by its tokens, and scaled to unit length
    if all of theirs are: so that it is the text's own vector where there is one window.
    """
    windows = [window.output.values[index] for window in row.windows]
    vectors = [window for window in windows if not isinstance(window, SparseVector)]
    if len(vectors) == 1:
        return vectors[0]
    weights = np.array([window.tokens for window in row.windows], dtype=np.float32)
    mean: Vectors = np.average(np.stack(vectors), axis=0, weights=weights).astype(np.float32)
    lengths = np.linalg.norm(np.stack(vectors), axis=1)
    return mean / np.linalg.norm(mean) if np.allclose(lengths, 1, atol=1e-3) else mean
