"""Heads that give weights over the vocabulary, or over the latents of a sparse autoencoder."""

from collections.abc import Collection, Sequence
from functools import partial
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from attrs import frozen
from torch import Tensor, nn

from trio_pool_serve.runner.batch_rows import Indices
from trio_pool_serve.runner.forward_pass import ForwardPass, HeadRows
from trio_pool_serve.runner.heads.embedding import split_tokens
from trio_pool_serve.runner.heads.pooling import Pooler
from trio_pool_serve.runner.openvino.heads import greatest_of_tokens
from trio_pool_serve.runner.row_states import RowStates
from trio_pool_serve.runner.torch_device import to_device
from trio_pool_serve.types import PooledValue, PoolingRequest, SparseEmbed, SparseLookup, SparseVector

USUAL_WEIGHTS = 512
"""Weights above zero per row that are copied at once, as a mean over the batch: more than trained models are expected
to give. If one gives more, a second copy has all."""

SELECTED_PART = 8
"""The numbers that are selected at a time are at most this part of a batch's weights: an index takes 8 bytes, and the
selection of a request must not take more memory than was tried when the model was loaded."""

ACTIVATED_AT_ONCE = 512
"""Tokens whose logits are activated at a time if they are summed: all would take the memory of the logits twice."""


def _greatest(weights: Tensor, params: Sequence[SparseEmbed], default: int | None) -> Tensor:
    """Set all but the ``max_active_dims`` greatest of each row of weights [rows, width] to zero, and return them."""
    rows, width = weights.shape
    limits = np.array([min(param.max_active_dims or default or width, width) for param in params])
    if (most := int(limits.max())) == limits.min() == width:
        return weights
    at_once = max(1, weights.numel() // (SELECTED_PART * most))
    for begin in range(0, rows, at_once):
        some, limits_of_some = weights[begin : begin + at_once], limits[begin : begin + at_once]
        indices = some.abs().topk(most, dim=1).indices
        greatest = some.gather(1, indices)
        if most > limits_of_some.min():
            counts = to_device(limits_of_some, weights.device)[:, None]
            greatest = greatest * (torch.arange(most, device=weights.device) < counts)
        some.zero_().scatter_(1, indices, greatest)
    return weights


def _nonzero(array: npt.NDArray[np.float32]) -> list[PooledValue]:
    return [SparseVector(indices.astype(np.int32), row[indices]) for row in array for indices in np.nonzero(row)]


def compact(weights: Tensor) -> HeadRows:
    """Return the weights above zero of rows [rows, vocabulary], float32, with their indices: int32, [numbers].

    Only the device knows their number, so the usual number is copied, without a synchronisation:
    ``USUAL_WEIGHTS`` per row. If there are more, the thread that waits for the copy copies all of them.
    """
    if weights.device.type == "cpu":  # nothing is copied
        return HeadRows(weights, _nonzero)
    rows, vocabulary = weights.shape
    copied = min(weights.numel(), USUAL_WEIGHTS * rows)
    flat = weights.flatten()
    places = flat.nonzero_static(size=copied, fill_value=0).squeeze(1)
    found = flat.index_select(0, places).view(torch.int32)
    numbers = torch.cat([weights.count_nonzero(dim=1).int(), (places % vocabulary).int(), found])

    def split(array: npt.NDArray[np.int32]) -> list[PooledValue]:
        found, indices, values = array[:rows], array[rows : rows + copied], array[rows + copied :].view(np.float32)
        total = int(found.sum())
        if total > copied:
            every = flat.nonzero().squeeze(1)
            indices, values = (every % vocabulary).int().cpu().numpy(), flat.index_select(0, every).cpu().numpy()
        ends = np.cumsum(found)[:-1]
        return [
            SparseVector(*of_row)
            for of_row in zip(np.split(indices[:total], ends), np.split(values[:total], ends), strict=True)
        ]

    return HeadRows(numbers, split)


def _groups(lengths: Indices, max_tokens: int) -> list[list[int]]:
    """Return the rows in groups of at most ``max_tokens`` tokens, or of one row."""
    groups: list[list[int]] = []
    tokens_left = 0
    for row, length in enumerate(lengths.tolist()):
        tokens_left -= length
        if tokens_left < 0:
            groups.append([])
            tokens_left = max_tokens - length
        groups[-1].append(row)
    return groups


@frozen(eq=False)
class SpladeHead:
    """The head of ``SparseEmbed`` for masked language models: ``log(1 + relu(logit))``, pooled over the tokens.

    Formal et al., https://arxiv.org/abs/2109.10086, eq. 1 and 3. ``log1p_twice`` applies ``log(1 + x)`` again, as
    OpenSearch's third generation does. ``max_active_dims`` limits a row to its greatest weights.
    """

    pooling: Literal["max", "sum"] = "max"
    log1p_twice: bool = False
    max_active_dims: int | None = None

    def __call__(self, forward: ForwardPass, params: Sequence[SparseEmbed]) -> HeadRows:
        """Return the weights above zero, as ``compact`` does."""
        states = forward.required_states
        whole = np.zeros_like(states.lengths)
        if self.pooling == "max":
            # The activation is monotonic: the greatest logit has the greatest weight.
            weights = self._activate(states.maxima(whole))
        else:
            groups = _groups(states.lengths, ACTIVATED_AT_ONCE)
            weights = torch.cat([self._sum(states.select(rows)) for rows in groups])
        return compact(_greatest(weights, params, self.max_active_dims))

    def padded(self, logits: Tensor, mask: Tensor) -> Tensor:
        """Return the weights of padded rows [rows, tokens, vocabulary]: [rows, vocabulary]; the mask is 0 or 1."""
        masked = mask.unsqueeze(-1).float()
        if self.pooling == "max":
            return self._activate((logits * masked).amax(dim=1))  # a logit of 0 has the weight 0, the least
        return (self._activate(logits) * masked).sum(dim=1)

    def _sum(self, states: RowStates) -> Tensor:
        activated = RowStates.packed(self._activate(states.at(states.cells)), states.lengths)
        return activated.sums(np.zeros_like(states.lengths))

    def _activate(self, logits: Tensor) -> Tensor:
        weights = logits.float().relu().log1p()
        return weights.log1p() if self.log1p_twice else weights


class SparseEncoding(nn.Module):
    """The encoder of a sparse autoencoder, before all but the greatest latents are set to zero.

    ``relu(W (x - pre_bias) + latent_bias)`` of a vector x, which is standardised first if ``standardises``:
    sentence-transformers' SparseAutoEncoder, after Gao et al., https://arxiv.org/abs/2406.04093. ``weight`` W is
    [latents, d], ``latent_bias`` [latents], ``pre_bias`` [d], all float32.
    """

    def __init__(self, weight: Tensor, latent_bias: Tensor, pre_bias: Tensor, *, standardises: bool) -> None:
        super().__init__()
        tensors = weight, latent_bias, pre_bias
        self.weight, self.latent_bias, self.pre_bias = (nn.Parameter(each, requires_grad=False) for each in tensors)
        self.standardises = standardises

    def forward(self, rows: Tensor) -> Tensor:
        """Map [rows, d] to [rows, latents]."""
        if self.standardises:
            rows = rows - rows.mean(dim=-1, keepdim=True)
            rows = rows / (rows.std(dim=-1, keepdim=True) + 1e-5)
        return nn.functional.linear(rows - self.pre_bias, self.weight, self.latent_bias).relu()


@frozen(eq=False)
class LatentHead:
    """The head of ``SparseEmbed`` for sparse autoencoders, whose encoder is the last module of ``pooler``.

    Wen et al., https://arxiv.org/abs/2503.01776. The encoder's output is not negative: its greatest numbers are the
    greatest before ReLU, as far as these are above zero.
    """

    pooler: Pooler
    max_active_dims: int

    def __call__(self, forward: ForwardPass, params: Sequence[SparseEmbed]) -> HeadRows:
        """Return the latents above zero, as ``compact`` does."""
        latents = self.pooler(forward.required_states, forward.skipped)
        return compact(_greatest(latents, params, self.max_active_dims))


@frozen(eq=False)
class SparseLookupHead:
    """The head of ``SparseLookup``: the fixed weight of every token that occurs; ``weights`` [vocabulary] float32."""

    weights: Tensor
    max_active_dims: int | None = None

    def __call__(self, forward: ForwardPass, params: Sequence[SparseLookup]) -> HeadRows:
        """Return the weights of all tokens, [tokens]."""
        ids = np.concatenate([request.prompt.token_ids for request in forward.requests])
        of_tokens = self.weights.index_select(0, to_device(ids, self.weights.device))
        limits = [param.max_active_dims or self.max_active_dims for param in params]
        return HeadRows(of_tokens, partial(_by_token, requests=forward.requests, limits=limits))


@frozen(eq=False)
class LexicalHead:
    """The head of ``SparseEmbed`` for BGE-M3: one weight per token id, the greatest if it occurs several times.

    ``relu(linear(state))``; Chen et al., https://arxiv.org/abs/2402.03216, section 3.1. Token ids in ``unused``
    (the special tokens) have no weight.
    """

    linear: nn.Linear
    unused: Collection[int]

    def __call__(self, forward: ForwardPass, params: Sequence[SparseEmbed]) -> HeadRows:
        """Return the weights of all tokens, [tokens]: over the vocabulary they would be ten thousand times as many."""
        states = forward.required_states
        of_tokens = self.linear(states.at(states.cells).float()).squeeze(-1).relu()
        limits = [param.max_active_dims for param in params]
        return HeadRows(of_tokens, partial(_by_token, requests=forward.requests, limits=limits, unused=self.unused))


def _by_token(
    array: npt.NDArray[np.float32],
    requests: Sequence[PoolingRequest],
    limits: Sequence[int | None],
    unused: Collection[int] = (),
) -> list[PooledValue]:
    rows = split_tokens(array, np.array([request.tokens for request in requests]))
    return [
        greatest_of_tokens(request.prompt, of_row, max_active_dims=limit, unused=unused)
        for of_row, request, limit in zip(rows, requests, limits, strict=True)
    ]
