"""Token pooling: vectors of a text's tokens are clustered, and each cluster is replaced by its mean.

As sentence-transformers' HierarchicalTokenPooling, with the same numbers in the same order, unless two distances are
equal or nearly so: then which clusters are merged first depends on the last bits.
"""

import math
from typing import Any, TypeAlias, get_args

import numpy as np
import numpy.typing as npt
from attrs import frozen

from trio_pool_serve.errors import ModelLoadError
from trio_pool_serve.models.files.folder_files import ModuleFiles
from trio_pool_serve.prompts import InputType
from trio_pool_serve.types import Vectors

Merge: TypeAlias = tuple[float, int, int]
"""Two clusters that become one, each given by one of its vectors, and the square of their distance."""


@frozen(kw_only=True)
class TokenPooling:
    """How the vectors of a text's tokens are clustered, and each cluster replaced by its mean.

    ``factor`` is tokens per cluster; the first ``protected_tokens`` stay as they are. ``normalizes``: the means are
    scaled to unit length. Texts without an input type are documents.
    """

    factor: float
    protected_tokens: int = 1
    normalizes: bool = True
    input_types: frozenset[InputType] = frozenset({"document"})

    def __str__(self) -> str:
        return f"{' and '.join(sorted(self.input_types))} tokens pooled by {self.factor:g}"

    def applies_to(self, input_type: InputType | None) -> bool:
        """Return whether texts of this input type are pooled."""
        return (input_type or "document") in self.input_types


def read_token_pooling(module: ModuleFiles) -> TokenPooling:
    """Return the pooling that a module declares, with sentence-transformers' defaults.

    Raises ``ModelLoadError`` for values that sentence-transformers refuses, and for unknown tasks.
    """
    config, known = module.config, get_args(InputType)
    tasks: Any = config.get("tasks", "document")
    if tasks is None or isinstance(tasks, str):
        tasks = ["document" if tasks is None else tasks]
    factor, protected = config.get("pool_factor", 1.0), config.get("num_protected_tokens", 1)
    normalizes = config.get("normalize_embeddings", False)
    accepted = {
        "pool_factor": (is_number(factor) and factor >= 1 and math.isfinite(factor), "a number of at least 1"),
        "num_protected_tokens": (type(protected) is int and protected >= 0, "an integer of at least 0"),
        "normalize_embeddings": (isinstance(normalizes, bool), "true or false"),
        "tasks": (isinstance(tasks, list) and all(task in known for task in tasks), f"a list of {' and '.join(known)}"),
    }
    for key, (is_accepted, what) in accepted.items():
        if not is_accepted:
            raise ModelLoadError(f"{module.path / 'config.json'}: {key} is {config[key]!r}; it must be {what}.")
    return TokenPooling(factor=factor, protected_tokens=protected, normalizes=normalizes, input_types=frozenset(tasks))


def is_number(value: object) -> bool:
    """Return whether a JSON value is a number."""
    return isinstance(value, int | float) and not isinstance(value, bool)


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
