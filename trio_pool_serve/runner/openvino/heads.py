"""Heads in NumPy, from a graph's outputs to values: one class for each kind of head, as in a model's record.

The graph has computed everything that is the same for all requests: pooling, projections, logits, activations. Here are
the choices of requests (dimensions, normalisation, kept tokens) and outputs whose size differs from row to row.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt
from attrs import field, frozen

from trio_pool_serve.types import (
    Classify,
    Embed,
    EmbedChunks,
    MaxSim,
    PooledValue,
    PoolingParams,
    PoolingRequest,
    RenderedPrompt,
    SparseEmbed,
    SparseLookup,
    SparseVector,
    TokenClassify,
    TokenEmbed,
)

Floats: TypeAlias = npt.NDArray[np.float32]

EMPTY_SCORE = -1e9
"""Score of a document without kept tokens: below every real score, and the same as in sentence-transformers."""


@frozen(eq=False)
class Outputs:
    """A graph's outputs for ``requests`` by name, [rows, …]; none if no head needs any.

    The arrays may be overwritten by the next pass: heads return copies. ``after_pooling`` applies the modules
    after pooling, for chunks; ``table`` has the weight of each token of the vocabulary, for ``SparseLookup``.
    """

    requests: Sequence[PoolingRequest]
    arrays: Mapping[str, npt.NDArray[Any]] = field(factory=dict)
    after_pooling: Callable[[Floats], Floats] = lambda vectors: vectors
    table: Floats | None = None


class Head(msgspec.Struct, frozen=True, tag=True):
    """Turns the outputs for a row into the value of one of its params. It reads the ``output`` of that name."""

    output: str = ""

    def values(self, outputs: Outputs, rows: Sequence[int], params: Sequence[Any]) -> list[PooledValue]:
        """Return the value of each of ``rows``, which are indices; ``params`` has one for each of them."""
        return [self._value(outputs, row, param) for row, param in zip(rows, params, strict=True)]

    def _value(self, outputs: Outputs, row: int, param: Any) -> PooledValue:
        raise NotImplementedError


class Vector(Head, frozen=True, tag=True):
    """``Embed``: pooled vectors, [rows, d]. ``normalizes`` is the model's default."""

    normalizes: bool = False

    def values(self, outputs: Outputs, rows: Sequence[int], params: Sequence[Embed]) -> list[PooledValue]:
        """Return the rows' vectors; rows with equal params are computed at once."""
        if params.count(params[0]) < len(params):
            return [self.values(outputs, [row], [param])[0] for row, param in zip(rows, params, strict=True)]
        return list(finished(outputs.arrays[self.output][list(rows)], params[0], normalizes=self.normalizes))


class Chunks(Head, frozen=True, tag=True):
    """``EmbedChunks``: the states of tokens, [rows, tokens, hidden], pooled for each chunk.

    For a model that takes means this is late chunking: Günther et al., https://arxiv.org/abs/2409.04701, algorithm 1.
    """

    pooling: tuple[str, ...] = ()
    normalizes: bool = False

    def _value(self, outputs: Outputs, row: int, param: EmbedChunks) -> Floats:
        states, prompt = outputs.arrays[self.output][row], outputs.requests[row].prompt
        bounds = [(0, len(prompt.token_ids))] if prompt.chunks is None else prompt.chunks.tolist()
        pooled = [[POOLINGS[name](states[begin:end]) for name in self.pooling] for begin, end in bounds]
        vectors = np.array([np.concatenate(of_chunk) for of_chunk in pooled], dtype=np.float32)
        return finished(outputs.after_pooling(vectors), param, normalizes=self.normalizes)


class TokenVectors(Head, frozen=True, tag=True):
    """``TokenEmbed``: a vector for each token, [rows, tokens, d]; only kept tokens are returned."""

    normalizes: bool = False

    def _value(self, outputs: Outputs, row: int, param: TokenEmbed) -> Floats:
        vectors = kept(outputs.arrays[self.output][row], outputs.requests[row].prompt)
        return finished(vectors, param, normalizes=self.normalizes)


class LateInteraction(TokenVectors, frozen=True, tag=True):
    """``MaxSim``. ``mean_scores``: scores are divided by the number of the query's vectors."""

    mean_scores: bool = False

    def _value(self, outputs: Outputs, row: int, param: Any) -> Floats:
        vectors = super()._value(outputs, row, TokenEmbed())
        return max_sim(np.asarray(param.query, np.float32), vectors, mean_scores=self.mean_scores)


class VocabularyWeights(Head, frozen=True, tag=True):
    """``SparseEmbed``: weights over the vocabulary or latents, [rows, width]; returns the greatest of a row.

    ``max_active_dims`` is the model's default.
    """

    max_active_dims: int | None = None

    def _value(self, outputs: Outputs, row: int, param: SparseEmbed) -> SparseVector:
        weights, limit = outputs.arrays[self.output][row], param.max_active_dims or self.max_active_dims
        (indices,) = np.nonzero(weights)
        if limit is not None and len(indices) > limit:
            greatest = np.argpartition(-weights[indices], limit - 1)[:limit]
            indices = np.sort(indices[greatest])
        return SparseVector(indices.astype(np.int32), weights[indices])


class TokenWeights(Head, frozen=True, tag=True):
    """``SparseEmbed`` for BGE-M3: a weight for each token, [rows, tokens]; tokens in ``unused`` have none."""

    unused: tuple[int, ...] = ()

    def _value(self, outputs: Outputs, row: int, param: SparseEmbed) -> SparseVector:
        prompt, of_tokens = outputs.requests[row].prompt, outputs.arrays[self.output][row]
        return greatest_of_tokens(prompt, of_tokens, max_active_dims=param.max_active_dims, unused=self.unused)


class TableWeights(Head, frozen=True, tag=True):
    """``SparseLookup``: the weights of a row's tokens in the table, without a forward pass."""

    max_active_dims: int | None = None

    def _value(self, outputs: Outputs, row: int, param: SparseLookup) -> SparseVector:
        assert outputs.table is not None  # noqa: S101
        prompt, limit = outputs.requests[row].prompt, param.max_active_dims or self.max_active_dims
        return greatest_of_tokens(prompt, outputs.table[prompt.token_ids], max_active_dims=limit)


class Labels(Head, frozen=True, tag=True):
    """``Classify``: numbers of a row's labels, [rows, labels], in an output for each activation."""

    def _value(self, outputs: Outputs, row: int, param: Classify) -> Floats:
        return np.array(outputs.arrays[f"{self.output}_{param.activation}"][row])


class TokenLabels(Head, frozen=True, tag=True):
    """``TokenClassify``: numbers of each token's labels, [rows, tokens, labels], in an output for each activation.

    With ``step_token_id`` only tokens of that id are kept: the ends of the steps that a process reward model scores.
    """

    step_token_id: int | None = None

    def _value(self, outputs: Outputs, row: int, param: TokenClassify) -> Floats:
        numbers, prompt = outputs.arrays[f"{self.output}_{param.activation}"][row], outputs.requests[row].prompt
        if self.step_token_id is None:
            return np.array(kept(numbers, prompt))
        return np.array(numbers[: len(prompt.token_ids)][prompt.token_ids == self.step_token_id])


AnyHead: TypeAlias = (
    Vector | Chunks | TokenVectors | LateInteraction | VocabularyWeights | TokenWeights | TableWeights | Labels
    | TokenLabels
)  # fmt: skip

PARAMS: Mapping[str, type[PoolingParams]] = {
    kind.__name__: kind
    for kind in (Embed, EmbedChunks, TokenEmbed, MaxSim, SparseEmbed, SparseLookup, Classify, TokenClassify)
}
"""The params that heads serve, by name."""


def finished(vectors: Floats, param: Any, *, normalizes: bool) -> Floats:
    """Return new vectors [..., d], truncated to the params' dimensions, and of unit length where these request it."""
    if param.dimensions:
        vectors = vectors[..., : param.dimensions]
    if not (normalizes if param.normalize is None else param.normalize):
        return np.array(vectors)
    lengths = np.linalg.norm(vectors, axis=-1, keepdims=True)
    scaled: Floats = np.divide(vectors, np.maximum(lengths, np.float32(1e-12)), dtype=np.float32)
    return scaled


def max_sim(query: Floats, document: Floats, *, mean_scores: bool) -> Floats:
    """Return the score of a document [tokens, d] against a query [q, d], shape (1,): see ``MaxSim``."""
    score = (document @ query.T).max(axis=0).sum() if len(document) else np.float32(EMPTY_SCORE)
    return np.array([score / max(1, len(query)) if mean_scores else score], dtype=np.float32)


def kept(of_tokens: npt.NDArray[Any], prompt: RenderedPrompt) -> npt.NDArray[Any]:
    """Return the entries of the kept tokens of a row, [tokens, …]."""
    own = of_tokens[: len(prompt.token_ids)]
    return own if prompt.kept is None else own[prompt.kept]


POOLINGS: Mapping[str, Callable[[Floats], Floats]] = {
    "cls": lambda states: states[0],
    "max": lambda states: states.max(axis=0),
    "mean": lambda states: states.mean(axis=0),
    "mean_sqrt_len_tokens": lambda states: states.sum(axis=0) / np.sqrt(len(states)),
    "weightedmean": lambda states: np.average(states, axis=0, weights=np.arange(1, len(states) + 1, dtype=np.float32)),
    "lasttoken": lambda states: states[-1],
}
"""The pooling of the states [tokens, hidden] of one chunk, by the names of ``runner.heads.pooling``."""


def greatest_of_tokens(
    prompt: RenderedPrompt,
    of_tokens: npt.NDArray[np.float32],
    *,
    max_active_dims: int | None = None,
    unused: Collection[int] = (),
) -> SparseVector:
    """Return the greatest weight of each attended token id, limited to the ``max_active_dims`` greatest.

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
