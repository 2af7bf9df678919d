"""Heads that give one vector per row, chunk or token, truncated and normalised in the same way."""

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from attrs import frozen
from torch import Tensor, nn

from trio_pool_serve.runner.batch_rows import Indices
from trio_pool_serve.runner.forward_pass import ForwardPass, HeadRows, HostArray
from trio_pool_serve.runner.heads.pooling import Pooler
from trio_pool_serve.runner.row_states import RowStates
from trio_pool_serve.runner.torch_device import to_device
from trio_pool_serve.types import Embed, EmbedChunks, PooledValue, TokenEmbed


@frozen(eq=False)
class EmbeddingHead:
    """The head of ``Embed``: the pooler's vector, truncated and normalised."""

    pooler: Pooler

    def __call__(self, forward: ForwardPass, params: Sequence[Embed]) -> HeadRows:
        """Return rows [rows, d]."""
        pooled = self.pooler(forward.required_states, forward.skipped)
        rows = truncate_and_normalize(pooled, params, normalizes=self.pooler.normalizes)
        kept = [param.dimensions or rows.shape[-1] for param in params]
        return HeadRows(rows, lambda array: [row[:length] for row, length in zip(array, kept, strict=True)])


@frozen(eq=False)
class ChunkEmbeddingHead:
    """The head of ``EmbedChunks``: the pooler's vector of each chunk of a document, as if it were a row.

    For a pooler that takes means this is late chunking: Günther et al., https://arxiv.org/abs/2409.04701, algorithm 1.
    """

    pooler: Pooler

    def __call__(self, forward: ForwardPass, params: Sequence[EmbedChunks]) -> HeadRows:
        """Return rows [chunks, d], document after document."""
        states = forward.required_states
        prompts = [request.prompt for request in forward.requests]
        # A prompt without chunks is one.
        chunks = [[[0, len(one.token_ids)]] if one.chunks is None else one.chunks for one in prompts]
        counts = np.array([len(of_row) for of_row in chunks])
        begins, ends = np.concatenate(chunks).astype(np.int64).T
        of_chunks = RowStates(states.flat, np.repeat(states.begins, counts) + begins, ends - begins)
        pooled = self.pooler(of_chunks, np.zeros_like(begins))
        rows = truncate_and_normalize(pooled, params, normalizes=self.pooler.normalizes, repeats=counts)
        return HeadRows(rows, _splitter(params, counts, rows.shape[-1]))


@frozen(eq=False)
class TokenEmbeddingHead:
    """The head of ``TokenEmbed``: the vector of every kept token, projected if the model has a projection.

    ``project`` maps states [tokens, hidden] float32 to [tokens, d].
    """

    project: nn.Module
    normalizes: bool

    def vectors(self, forward: ForwardPass, params: Sequence[TokenEmbed]) -> tuple[Tensor, Indices]:
        """Return the vectors of the kept tokens of all rows, [tokens, d] float32, and the number of each row's."""
        states, counts = forward.kept_states()
        vectors = self.project(states.float())
        return truncate_and_normalize(vectors, params, normalizes=self.normalizes, repeats=counts), counts

    def __call__(self, forward: ForwardPass, params: Sequence[TokenEmbed]) -> HeadRows:
        """Return rows [tokens, d], input after input."""
        vectors, counts = self.vectors(forward, params)
        return HeadRows(vectors, _splitter(params, counts, vectors.shape[-1]))


def _splitter(
    params: Sequence[EmbedChunks | TokenEmbed], counts: Indices, width: int
) -> Callable[[HostArray], list[PooledValue]]:
    """Return the function that splits vectors [vectors, width] into rows of ``counts`` vectors, each truncated."""
    dimensions = [param.dimensions or width for param in params]

    def split(array: HostArray) -> list[PooledValue]:
        return [row[:, :length] for row, length in zip(split_tokens(array, counts), dimensions, strict=True)]

    return split


def split_tokens(array: HostArray, counts: Indices) -> list[HostArray]:
    """Return for each row the part of an array [tokens, …] that belongs to it: ``counts`` tokens."""
    return np.split(array, np.cumsum(counts)[:-1])


def truncate_and_normalize(
    rows: Tensor, params: Sequence[Embed | TokenEmbed], *, normalizes: bool, repeats: Indices | None = None
) -> Tensor:
    """Return vectors [rows, d], zero past each row's own dimensions, normalised where its params request it.

    ``normalizes`` is the model's default. With ``repeats``, each params apply to that many consecutive vectors.
    """
    width = rows.shape[-1]

    def of_rows(values: npt.NDArray[np.generic]) -> Tensor:
        return to_device((values if repeats is None else np.repeat(values, repeats))[:, None], rows.device)

    dimensions = [param.dimensions or width for param in params]
    if any(length < width for length in dimensions):
        rows = rows * (torch.arange(width, device=rows.device) < of_rows(np.array(dimensions)))
    normalized = [normalizes if param.normalize is None else param.normalize for param in params]
    if all(normalized):
        return nn.functional.normalize(rows, dim=-1)
    if any(normalized):
        return torch.where(of_rows(np.array(normalized)), nn.functional.normalize(rows, dim=-1), rows)
    return rows
