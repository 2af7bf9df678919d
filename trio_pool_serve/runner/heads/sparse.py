"""Heads that give weights over the vocabulary."""

from collections.abc import Sequence
from functools import partial
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from attrs import frozen
from torch import Tensor, nn

from trio_pool_serve.runner.forward_pass import ForwardPass
from trio_pool_serve.runner.heads.head import HeadRows
from trio_pool_serve.types import PooledValue, PoolingRequest, SparseEmbed, SparseLookup, SparseVector


def _nonzero(array: npt.NDArray[np.float32]) -> list[PooledValue]:
    found: list[PooledValue] = []
    for row in array:
        (indices,) = np.nonzero(row)
        found.append(SparseVector(indices.astype(np.int32), row[indices]))
    return found


def _greatest(weights: Tensor, max_active_dims: int | None) -> Tensor:
    """Return weights [rows, vocabulary] with all but the ``max_active_dims`` greatest of each row set to zero."""
    if max_active_dims is None or max_active_dims >= weights.shape[1]:
        return weights
    indices = weights.abs().topk(max_active_dims, dim=1).indices
    return torch.zeros_like(weights).scatter_(1, indices, weights.gather(1, indices))


@frozen(eq=False)
class SpladeHead:
    """The head of ``SparseEmbed`` for masked language models: ``log(1 + relu(logit))``, pooled over the tokens.

    Formal et al., https://arxiv.org/abs/2109.10086, eq. 1 and 3. ``log1p_twice`` applies ``log(1 + x)`` again, as
    OpenSearch's third generation does. ``max_active_dims`` limits a row to its greatest weights.
    """

    pooling: Literal["max", "sum"] = "max"
    log1p_twice: bool = False
    max_active_dims: int | None = None
    reads_states = True

    def __call__(self, forward: ForwardPass, params: Sequence[SparseEmbed]) -> HeadRows:  # noqa: ARG002
        """Return weights [rows, vocabulary].

        Row by row: activating a whole batch at once would take the memory of its logits a second time.
        """
        of_rows = (
            row[: request.tokens] for row, request in zip(forward.required_states, forward.requests, strict=True)
        )
        if self.pooling == "max":
            # The activation is monotonic: the greatest logit has the greatest weight.
            weights = self._activate(torch.stack([logits.amax(dim=0) for logits in of_rows]))
        else:
            weights = torch.stack([self._activate(logits).sum(dim=0) for logits in of_rows])
        return HeadRows(_greatest(weights, self.max_active_dims), _nonzero)

    def _activate(self, logits: Tensor) -> Tensor:
        weights = logits.float().relu().log1p()
        return weights.log1p() if self.log1p_twice else weights


@frozen(eq=False)
class SparseLookupHead:
    """The head of ``SparseLookup``: the fixed weight of every token that occurs; ``weights`` [vocabulary] float32."""

    weights: Tensor
    max_active_dims: int | None = None
    reads_states = False

    def __call__(self, forward: ForwardPass, params: Sequence[SparseLookup]) -> HeadRows:  # noqa: ARG002
        """Return the tokens' weights [rows, tokens]."""
        of_tokens = self.weights[forward.input_ids] * forward.attention_mask
        return HeadRows(of_tokens, partial(_by_token, requests=forward.requests, max_active_dims=self.max_active_dims))


@frozen(eq=False)
class LexicalHead:
    """The head of ``SparseEmbed`` for BGE-M3: one weight per token id, the greatest if it occurs several times.

    ``relu(linear(state))``; Chen et al., https://arxiv.org/abs/2402.03216, section 3.1. Token ids in ``unused``
    (the special tokens) have no weight.
    """

    linear: nn.Linear
    unused: Tensor
    reads_states = True

    def __call__(self, forward: ForwardPass, params: Sequence[SparseEmbed]) -> HeadRows:  # noqa: ARG002
        """Return the tokens' weights [rows, tokens]: over the vocabulary they would be ten thousand times as many."""
        of_tokens = self.linear(forward.required_states.float()).squeeze(-1).relu()
        of_tokens = of_tokens.masked_fill(torch.isin(forward.input_ids, self.unused), 0.0)
        return HeadRows(of_tokens, partial(_by_token, requests=forward.requests))


def _by_token(
    array: npt.NDArray[np.float32], requests: Sequence[PoolingRequest], max_active_dims: int | None = None
) -> list[PooledValue]:
    """Return the greatest weight of each token id that occurs, and of these the ``max_active_dims`` greatest."""
    found: list[PooledValue] = []
    for row, request in zip(array, requests, strict=True):
        of_tokens = row[: request.tokens]
        indices, first, places = np.unique(request.prompt.token_ids, return_index=True, return_inverse=True)
        weights = of_tokens[first]
        np.maximum.at(weights, places, of_tokens)
        (nonzero,) = np.nonzero(weights)
        if max_active_dims is not None and len(nonzero) > max_active_dims:
            nonzero = np.sort(nonzero[np.argsort(-np.abs(weights[nonzero]), kind="stable")[:max_active_dims]])
        found.append(SparseVector(indices[nonzero], weights[nonzero]))
    return found
