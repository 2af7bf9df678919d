"""Hierarchical clusters of unit vectors, by Ward's linkage, in NumPy: O(n²) time and memory."""

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from trio_pool_serve.types import Vectors

Merge: TypeAlias = tuple[float, int, int]
"""Two clusters that become one, each given by one of its vectors, and the square of their distance."""


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
