"""The runner of static embeddings: means of the rows of a table, by NumPy. It needs neither torch nor OpenVINO."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from attrs import frozen

from trio_pool_serve.runner.openvino.heads import Floats, finished
from trio_pool_serve.runner.vector_modules import VectorModule
from trio_pool_serve.types import (
    Batch,
    CopiedBatch,
    Embed,
    EmbedChunks,
    PooledValue,
    PoolingParams,
    RenderedPrompt,
    RunnerFacts,
    TokenIds,
)

AT_ONCE = 1024
"""Tokens of a text whose rows are copied and added at a time: sums of more lose digits."""


@frozen(eq=False)
class TokenTable:
    """The vector of each token: ``rows[mapping[token]] * weights[token]``, shape (d,).

    ``rows`` is float32 or int8, [rows, d]. Without ``mapping`` each token has the row of its id; without ``weights``
    all weights are 1. Both have one number per token.
    """

    rows: npt.NDArray[Any]
    mapping: npt.NDArray[np.integer[Any]] | None = None
    weights: Floats | None = None

    @classmethod
    def of(cls, tensors: Mapping[str, npt.NDArray[Any]]) -> "TokenTable":
        """Return the table in a file's tensors, whose shapes fit. Raises ``ValueError`` for a mapping to no rows."""
        if (rows := tensors.get("embedding.weight")) is not None:
            mapping = weights = None
        else:
            rows, mapping, weights = tensors["embeddings"], tensors.get("mapping"), tensors.get("weights")
        if mapping is not None and not (mapping.dtype.kind == "i" and 0 <= mapping.min() <= mapping.max() < len(rows)):
            found = f"mapping ({mapping.dtype}) contains numbers from {mapping.min()} to {mapping.max()}"
            raise ValueError(f"{found}; they must be indices of the {len(rows)} rows")
        rows = rows if rows.dtype == np.int8 else rows.astype(np.float32, copy=False)
        return cls(rows, mapping, None if weights is None else weights.astype(np.float32))

    def mean(self, token_ids: TokenIds) -> Floats:
        """Return the mean of the tokens' vectors, [d]; zeros for no tokens."""
        total = np.zeros(self.width, dtype=np.float32)
        for begin in range(0, len(token_ids), AT_ONCE):
            part = token_ids[begin : begin + AT_ONCE]
            vectors = self.rows.take(part if self.mapping is None else self.mapping[part], axis=0)
            if self.weights is None:
                total += vectors.sum(axis=0, dtype=np.float32)
            else:
                total += self.weights[part] @ vectors.astype(np.float32, copy=False)
        return total / np.float32(max(1, len(token_ids)))

    @property
    def width(self) -> int:
        """Numbers of a vector."""
        return int(self.rows.shape[1])

    @property
    def parameters(self) -> int:
        """Numbers of the table, without ``mapping``."""
        return self.rows.size + (0 if self.weights is None else self.weights.size)

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        return sum(array.nbytes for array in (self.rows, self.mapping, self.weights) if array is not None)


@frozen(eq=False)
class StaticRunner:
    """Computes batches in the launching thread. ``normalizes`` is the model's default, after the ``modules``."""

    table: TokenTable
    modules: Sequence[VectorModule]
    normalizes: bool
    facts: RunnerFacts

    def launch(self, batch: Batch) -> CopiedBatch:
        """Compute the rows."""
        wanted = [(request.prompt, param) for request in batch.requests for param in request.params]
        parts = [_parts(prompt, param) for prompt, param in wanted]
        vectors = np.array([self.table.mean(ids) for of_one in parts for ids in of_one])
        for module in self.modules:
            vectors = module(vectors)
        params = [param for _, param in wanted]
        if len(vectors) == len(batch.requests) and type(params[0]) is Embed and params.count(params[0]) == len(params):
            return CopiedBatch([(row,) for row in finished(vectors, params[0], normalizes=self.normalizes)])
        ends = np.cumsum([len(of_one) for of_one in parts])
        values = iter(
            [
                finished(of_one if isinstance(param, EmbedChunks) else of_one[0], param, normalizes=self.normalizes)
                for of_one, param in zip(np.split(vectors, ends[:-1]), params, strict=True)
            ]
        )
        rows: list[tuple[PooledValue, ...]] = [tuple(next(values) for _ in each.params) for each in batch.requests]
        return CopiedBatch(rows)

    def return_memory(self) -> None:
        """Do nothing: no memory is kept."""


def _parts(prompt: RenderedPrompt, param: PoolingParams) -> list[TokenIds]:
    """Return the token ids of each vector of a prompt: of its chunks for ``EmbedChunks``, else all of them."""
    if not isinstance(param, EmbedChunks) or prompt.chunks is None:
        return [prompt.token_ids[: prompt.attended]]
    return [prompt.token_ids[begin:end] for begin, end in prompt.chunks]
