"""Weights over the vocabulary."""

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


def _greatest(weights: Tensor, most: int | None) -> Tensor:
    """Return weights [rows, vocabulary] of which all but the greatest ``most`` of a row are zero."""
    if most is None or most >= weights.shape[1]:
        return weights
    indices = weights.abs().topk(most, dim=1).indices
    return torch.zeros_like(weights).scatter_(1, indices, weights.gather(1, indices))


@frozen(eq=False)
class SpladeHead:
    """``SparseEmbed`` of a masked language model: ``log(1 + relu(logit))``, pooled over the tokens.

    Formal et al., https://arxiv.org/abs/2109.10086, eq. 1 and 3. ``log_twice`` takes the logarithm again, as
    OpenSearch's third generation does. ``most_weights`` keeps the greatest so many.
    """

    pooling: Literal["max", "sum"] = "max"
    log_twice: bool = False
    most_weights: int | None = None
    reads_states = True

    def __call__(self, forward: ForwardPass, params: Sequence[SparseEmbed]) -> HeadRows:  # noqa: ARG002
        """Return weights [rows, vocabulary].

        Row by row: a copy of the logits of a whole batch would take as much memory as they do.
        """
        of_rows = (row[: request.tokens] for row, request in zip(forward.computed, forward.requests, strict=True))
        if self.pooling == "max":
            # The activation grows with the logit: of the greatest logit it is the greatest weight.
            weights = self._activate(torch.stack([logits.amax(dim=0) for logits in of_rows]))
        else:
            weights = torch.stack([self._activate(logits).sum(dim=0) for logits in of_rows])
        return HeadRows(_greatest(weights, self.most_weights), _nonzero)

    def _activate(self, logits: Tensor) -> Tensor:
        weights = logits.float().relu().log1p()
        return weights.log1p() if self.log_twice else weights


@frozen(eq=False)
class SparseLookupHead:
    """``SparseLookup``: the fixed weight of every token that occurs; ``weights`` [vocabulary] float32."""

    weights: Tensor
    most_weights: int | None = None
    reads_states = False

    def __call__(self, forward: ForwardPass, params: Sequence[SparseLookup]) -> HeadRows:  # noqa: ARG002
        """Return the tokens' weights [rows, tokens]."""
        of_tokens = self.weights[forward.input_ids] * forward.attention_mask
        return HeadRows(of_tokens, partial(_by_token, requests=forward.requests, most=self.most_weights))


@frozen(eq=False)
class LexicalHead:
    """``SparseEmbed`` of BGE-M3: one weight per token, the greatest where a token occurs again.

    ``relu(linear(state))``; Chen et al., https://arxiv.org/abs/2402.03216, section 3.1. Tokens in ``unused``
    (the special ones) have no weight.
    """

    linear: nn.Linear
    unused: Tensor
    reads_states = True

    def __call__(self, forward: ForwardPass, params: Sequence[SparseEmbed]) -> HeadRows:  # noqa: ARG002
        """Return the tokens' weights [rows, tokens]: over the vocabulary they would be ten thousand times more."""
        of_tokens = self.linear(forward.computed.float()).squeeze(-1).relu()
        of_tokens = of_tokens.masked_fill(torch.isin(forward.input_ids, self.unused), 0.0)
        return HeadRows(of_tokens, partial(_by_token, requests=forward.requests))


def _by_token(
    array: npt.NDArray[np.float32], requests: Sequence[PoolingRequest], most: int | None = None
) -> list[PooledValue]:
    """Return the greatest weight of each token that occurs, and of these the greatest ``most``."""
    found: list[PooledValue] = []
    for row, request in zip(array, requests, strict=True):
        of_tokens = row[: request.tokens]
        indices, first, places = np.unique(request.prompt.token_ids, return_index=True, return_inverse=True)
        weights = of_tokens[first]
        np.maximum.at(weights, places, of_tokens)
        (counting,) = np.nonzero(weights)
        if most is not None and len(counting) > most:
            counting = np.sort(counting[np.argsort(-np.abs(weights[counting]), kind="stable")[:most]])
        found.append(SparseVector(indices[counting], weights[counting]))
    return found
