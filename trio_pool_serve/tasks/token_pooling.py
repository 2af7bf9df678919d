"""Token pooling: vectors of a text's tokens are clustered, and each cluster is replaced by its mean.

As sentence-transformers' HierarchicalTokenPooling, with the same numbers in the same order, unless two distances are
equal or nearly so: then which clusters are merged first depends on the last bits.
"""

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from trio_pool_serve.errors import InvalidRequestError
from trio_pool_serve.models.model_kind import TokenPooling
from trio_pool_serve.tasks.model import Model
from trio_pool_serve.types import PooledValue, SparseVector, Vectors

MAX_CLUSTERED = 8192
"""Maximum vectors of a text: their distances take 256 MiB, and clustering them takes seconds."""

Merge: TypeAlias = tuple[float, int, int]
"""Two clusters that become one, each given by one of its vectors, and the square of their distance."""


async def pooled_tokens(
    model: Model,
    vectors: PooledValue,
    pooling: TokenPooling,
    finish: Callable[[Vectors], Vectors] = lambda pooled: pooled,
) -> Vectors:
    """Return what ``finish`` makes of the pooled vectors of one text; both run in a thread.

    Raises ``InvalidRequestError`` for more vectors than can be clustered. Cancellation: at once.
    """
    assert not isinstance(vectors, SparseVector)  # noqa: S101  (of another task)
    if len(vectors) > MAX_CLUSTERED:
        raise InvalidRequestError(
            f"An input has {len(vectors)} vectors of tokens; at most {MAX_CLUSTERED} can be pooled.", field="prompts"
        )
    return await model.renderer.offload.run(
        "cluster", lambda: finish(pool_rows(vectors, pooling)), abandon_on_cancel=True
    )


def pool_rows(vectors: Vectors, pooling: TokenPooling) -> Vectors:
    """Return the protected vectors and then the mean of each cluster: [tokens, d] to [fewer, d]."""
    rest = vectors[pooling.protected_tokens :]
    count = max(int(len(rest) // pooling.factor), 1)
    if count < len(rest):
        means = [rest[members].mean(axis=0) for members in ward_clusters(rest, count)]
        vectors = np.concatenate([vectors[: pooling.protected_tokens], means], dtype=np.float32)
    if pooling.normalizes:
        vectors = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), np.float32(1e-12))
    return np.array(vectors)


def ward_clusters(vectors: Vectors, count: int) -> list[list[int]]:
    """Return the indices of the vectors in each of ``count`` clusters, or fewer if distances are equal.

    Ward's linkage of 1 − cosine: the vectors have unit length. The order is that of scipy's ``fcluster``: a walk from
    the root, where of two clusters with several vectors the one that was made first comes first, before single vectors.
    """
    n = len(vectors)
    distances = vectors @ vectors.T
    np.clip(np.subtract(1, distances, out=distances), 0, 2, out=distances)
    merges = sorted(_merges(np.square(distances, out=distances)), key=lambda merge: merge[0])
    highest = merges[n - count - 1][0]
    parents, members = list(range(2 * n - 1)), [[index] for index in range(n)]
    children: list[list[int]] = []

    def cluster_of(index: int) -> int:
        while parents[index] != index:
            parents[index] = index = parents[parents[index]]
        return index

    for made, (height, x, y) in enumerate(merges, n):
        both = sorted((cluster_of(x), cluster_of(y)))
        children.append(both)
        parents[both[0]] = parents[both[1]] = made
        if height <= highest:
            members.append(members[both[0]] + members[both[1]])
    found, unvisited = [], [2 * n - 2]
    while unvisited:
        cluster = unvisited.pop()
        if cluster < len(members):
            found.append(members[cluster])
        else:
            unvisited += sorted(children[cluster - n], key=lambda child: (child >= n, -child))
    return found


def _merges(distances: npt.NDArray[Any]) -> list[Merge]:
    """Return all merges by Ward's linkage, in any order; ``distances`` are squares [n, n], and are overwritten.

    The nearest-neighbour chain with Ward's formula: Müllner, https://arxiv.org/abs/1109.2378.
    """
    n = len(distances)
    np.fill_diagonal(distances, np.inf)  # of merged clusters too: these are no one's neighbours
    sizes, is_merged = np.ones(n, distances.dtype), np.zeros(n, np.bool_)
    merges: list[Merge] = []
    chain: list[int] = []
    while len(merges) < n - 1:
        if not chain:
            chain.append(int(is_merged.argmin()))
        x = chain[-1]
        row = distances[x]
        y = int(row.argmin())
        if len(chain) == 1 or row[chain[-2]] > row[y]:
            chain.append(y)
            continue
        _, y = chain.pop(), chain.pop()
        height, size = row[y], sizes[x] + sizes[y]
        merges.append((float(height), x, y))
        joined = (sizes + sizes[x]) * row
        joined += (sizes + sizes[y]) * distances[y]
        joined -= sizes * height
        joined /= sizes + size
        joined[[x, y]] = np.inf
        distances[y] = distances[:, y] = joined
        distances[:, x] = np.inf
        sizes[y], is_merged[x] = size, True
    return merges
