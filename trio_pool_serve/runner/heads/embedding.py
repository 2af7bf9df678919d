"""Heads that give one vector per row or per token, truncated and normalised in the same way."""

from collections.abc import Sequence
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from attrs import frozen
from torch import Tensor, nn

from trio_pool_serve.runner.forward_pass import ForwardPass
from trio_pool_serve.runner.heads.head import HeadRows
from trio_pool_serve.runner.heads.pooling import Pooler
from trio_pool_serve.types import Embed, PooledValue, PoolingRequest, TokenEmbed


@frozen(eq=False)
class EmbeddingHead:
    """The head of ``Embed``: the pooler's vector, truncated and normalised."""

    pooler: Pooler
    reads_states = True

    def __call__(self, forward: ForwardPass, params: Sequence[Embed]) -> HeadRows:
        """Return rows [rows, d]."""
        rows = truncate_and_normalize(
            self.pooler(forward.required_states, forward.pooled), params, normalizes=self.pooler.normalizes
        )
        kept = [param.dimensions or rows.shape[-1] for param in params]

        def split(array: npt.NDArray[np.float32]) -> list[PooledValue]:
            return [row[:length] for row, length in zip(array, kept, strict=True)]

        return HeadRows(rows, split)


@frozen(eq=False)
class TokenEmbeddingHead:
    """The head of ``TokenEmbed``: the vector of every kept token, projected if the model has a projection.

    ``project`` maps states [rows, tokens, hidden] float32 to [rows, tokens, d].
    """

    project: nn.Module
    normalizes: bool
    reads_states = True

    def vectors(self, forward: ForwardPass, params: Sequence[TokenEmbed]) -> Tensor:
        """Return the vectors of all tokens, [rows, tokens, d] float32."""
        return truncate_and_normalize(self.project(forward.required_states.float()), params, normalizes=self.normalizes)

    def __call__(self, forward: ForwardPass, params: Sequence[TokenEmbed]) -> HeadRows:
        """Return rows [rows, tokens, d]."""
        vectors = self.vectors(forward, params)
        dimensions = [param.dimensions or vectors.shape[-1] for param in params]
        return HeadRows(vectors, partial(_split_tokens, requests=forward.requests, dimensions=dimensions))


def _split_tokens(
    array: npt.NDArray[np.float32], requests: Sequence[PoolingRequest], dimensions: Sequence[int]
) -> list[PooledValue]:
    return [
        kept_tokens(row, request.tokens, request.prompt.kept)[:, :length]
        for row, request, length in zip(array, requests, dimensions, strict=True)
    ]


def kept_tokens(
    row: npt.NDArray[np.float32], tokens: int, kept: npt.NDArray[np.bool_] | None
) -> npt.NDArray[np.float32]:
    """Return the part of a padded row [longest, d] that belongs to kept tokens: shape (kept, d)."""
    return row[:tokens] if kept is None else row[:tokens][kept]


def truncate_and_normalize(rows: Tensor, params: Sequence[Embed | TokenEmbed], *, normalizes: bool) -> Tensor:
    """Return vectors [rows, …, d], zero past each row's own dimensions, normalised where its params request it.

    ``normalizes`` is the model's default.
    """
    width = rows.shape[-1]
    shape = (-1, *[1] * (rows.dim() - 1))
    dimensions = [param.dimensions or width for param in params]
    if any(length < width for length in dimensions):
        kept = torch.tensor(dimensions).view(shape).to(rows.device, non_blocking=True)
        rows = rows * (torch.arange(width, device=rows.device) < kept)
    normalized = [normalizes if param.normalize is None else param.normalize for param in params]
    if all(normalized):
        return nn.functional.normalize(rows, dim=-1)
    if any(normalized):
        chosen = torch.tensor(normalized).view(shape).to(rows.device, non_blocking=True)
        return torch.where(chosen, nn.functional.normalize(rows, dim=-1), rows)
    return rows
