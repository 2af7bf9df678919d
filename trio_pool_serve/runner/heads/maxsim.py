"""Late interaction in two stages, and the query vectors that are held between them.

Stage one (``HoldQuery``) leaves a query's token vectors on the device, in the ``QueryVectors`` of its request. Stage
two (``MaxSim``) scores documents against them there: only scores are copied to the host. Everything is computed on one
stream, so memory that is freed while a kernel still reads it is not overwritten before that kernel is done.
"""

import threading
from collections.abc import Sequence

import numpy as np
import torch
from attrs import define, field, frozen
from torch import Tensor

from trio_pool_serve.errors import QueryGoneError
from trio_pool_serve.runner.forward_pass import ForwardPass
from trio_pool_serve.runner.heads.embedding import TokenEmbeddingHead
from trio_pool_serve.runner.heads.head import HeadRows, HostArray
from trio_pool_serve.runner.row_states import RowStates
from trio_pool_serve.runner.transfers import to_device
from trio_pool_serve.types import HeldQuery, HoldQuery, MaxSim, PooledValue, TokenEmbed

EMPTY_SCORE = -1e9
"""Score of a document without kept tokens: below every real score, and the same as in sentence-transformers."""


@define(eq=False)
class HeldMemory:
    """The bytes that the scopes of one runner hold on its device, with a lock: several threads use it."""

    bytes: int = field(default=0, init=False)
    lock: threading.Lock = field(init=False, factory=threading.Lock, repr=False)


@define(eq=False)
class QueryVectors:
    """The token vectors of one request's queries: float32, [tokens, d] each, on the device.

    Filled by the thread that launches, closed on the event loop; vectors that come after that are dropped at once.
    """

    _memory: HeldMemory
    _vectors: dict[HeldQuery, Tensor] | None = field(init=False, factory=dict)

    def hold(self, query: HeldQuery, vectors: Tensor) -> None:
        """Keep a query's vectors until ``close``."""
        with self._memory.lock:
            if self._vectors is not None:
                known = self._vectors.get(query)  # a batch that failed may be computed again
                self._memory.bytes += vectors.nbytes - (0 if known is None else known.nbytes)
                self._vectors[query] = vectors

    def vectors_of(self, query: HeldQuery) -> Tensor | None:
        """Return a query's vectors, ``None`` once closed; raises ``QueryGoneError`` if they were never held."""
        with self._memory.lock:
            if self._vectors is None:
                return None
            held = self._vectors.get(query)
        if held is None:
            raise QueryGoneError("The query's vectors are not on the device.")
        return held

    def close(self) -> None:
        """Drop all vectors; later ones are dropped as well."""
        with self._memory.lock:
            if self._vectors is not None:
                self._memory.bytes -= sum(vectors.nbytes for vectors in self._vectors.values())
                self._vectors = None


def _values(array: HostArray) -> list[PooledValue]:
    return [row.reshape(1) for row in array]


@frozen(eq=False)
class HoldQueryHead:
    """The head of ``HoldQuery``: stage one."""

    tokens: TokenEmbeddingHead
    reads_states = True

    def __call__(self, forward: ForwardPass, params: Sequence[HoldQuery]) -> HeadRows:
        """Hold each row's vectors under its query; return their numbers, [rows]."""
        vectors, counts = self.tokens.vectors(forward, [TokenEmbed()] * len(params))
        for own, param in zip(torch.split(vectors, counts.tolist()), params, strict=True):
            scope = param.query.scope
            assert isinstance(scope, QueryVectors)  # noqa: S101  (this runner opened it)
            # A copy: a view would keep the whole batch's memory.
            scope.hold(param.query, own.clone())
        return HeadRows(to_device(counts.astype(np.float32), vectors.device), _values)


@frozen(eq=False)
class MaxSimHead:
    """The head of ``MaxSim``: stage two."""

    tokens: TokenEmbeddingHead
    mean_scores: bool = False
    """Whether scores are divided by the number of the query's vectors."""
    reads_states = True

    def __call__(self, forward: ForwardPass, params: Sequence[MaxSim]) -> HeadRows:
        """Return the rows' scores against their queries, [rows].

        NaN if the query's request has ended meanwhile: the score is not awaited, and the batch's other rows must not
        fail.
        """
        vectors, counts = self.tokens.vectors(forward, [TokenEmbed()] * len(params))
        documents = RowStates(vectors, np.cumsum(counts) - counts, counts)
        parts, places = [], []
        for query in dict.fromkeys(param.query for param in params):
            rows = [row for row, param in enumerate(params) if param.query is query]
            parts.append(self._scores(query, documents.select(rows)))
            places += rows
        if len(parts) == 1:
            return HeadRows(parts[0], _values)
        return HeadRows(torch.cat(parts).index_select(0, to_device(np.argsort(places), vectors.device)), _values)

    def _scores(self, query: HeldQuery, documents: RowStates) -> Tensor:
        scope = query.scope
        assert isinstance(scope, QueryVectors)  # noqa: S101  (this runner opened it)
        held = scope.vectors_of(query)
        if held is None:
            return torch.full(
                (len(documents.lengths),), float("nan"), dtype=torch.float32, device=documents.flat.device
            )
        scores = max_sim(held, documents)
        return scores / max(1, len(held)) if self.mean_scores else scores


def max_sim(query: Tensor, documents: RowStates) -> Tensor:
    """Score documents, whose vectors are [tokens, d], against one query [q, d]: [documents]."""
    vectors = documents.at(documents.cells)
    begins = np.cumsum(documents.lengths) - documents.lengths
    similarity = RowStates(vectors @ query.T, begins, documents.lengths)
    scores = similarity.maxima(np.zeros_like(begins)).sum(dim=1)
    if documents.lengths.all():
        return scores
    return scores.masked_fill(to_device(documents.lengths == 0, scores.device), EMPTY_SCORE)
