"""Token pooling: vectors of a text's tokens are clustered, and each cluster is replaced by its mean.

As sentence-transformers' HierarchicalTokenPooling, with the same numbers in the same order, unless two distances are
equal or nearly so: then which clusters are merged first depends on the last bits.
"""

import math
from typing import Any, get_args

import numpy as np
from attrs import frozen

from trio_pool_serve.errors import require
from trio_pool_serve.models.files.folder_files import ModuleFiles
from trio_pool_serve.prompts import InputType
from trio_pool_serve.runner.ward_clusters import ward_clusters
from trio_pool_serve.types import Vectors


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
        "pool_factor": (type(factor) in (int, float) and 1 <= factor < math.inf, "a number of at least 1"),
        "num_protected_tokens": (type(protected) is int and protected >= 0, "an integer of at least 0"),
        "normalize_embeddings": (isinstance(normalizes, bool), "true or false"),
        "tasks": (isinstance(tasks, list) and all(task in known for task in tasks), f"a list of {' and '.join(known)}"),
    }
    for key, (is_accepted, values) in accepted.items():
        require(is_accepted, f"{module.path / 'config.json'}: {key} is {config.get(key)!r}; it must be {values}.")
    return TokenPooling(factor=factor, protected_tokens=protected, normalizes=normalizes, input_types=frozenset(tasks))


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
