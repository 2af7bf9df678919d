"""The rows of a batch, as a backbone takes them and as heads read its output."""

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from attrs import evolve, field, frozen
from torch import Tensor

from trio_pool_serve.runner.row_states import Indices, RowStates
from trio_pool_serve.runner.transfers import host_buffer, to_device
from trio_pool_serve.types import PoolingRequest, RenderedPrompt


@frozen(eq=False)
class ForwardPass:
    """Rows that are computed together on ``device``.

    ``states`` is the backbone's output for them; ``None`` before it is computed, and where no head needs it.
    ``lengths`` are the numbers of tokens of the rows, int64.
    """

    requests: Sequence[PoolingRequest]
    device: torch.device
    pad_token_id: int
    states: RowStates | None = None
    lengths: Indices = field(kw_only=True)

    @lengths.default
    def _of_requests(self) -> Indices:
        return np.array([len(request.prompt.token_ids) for request in self.requests])

    @cached_property
    def skipped(self) -> Indices:
        """Number of leading tokens of each row that poolers leave out: the instruction's.

        Where the instruction is the whole input, it is pooled: there is nothing else.
        """
        skipped = np.array([request.prompt.instruction_tokens for request in self.requests])
        skipped[skipped >= self.lengths] = 0
        return skipped

    @cached_property
    def attended(self) -> Indices:
        """Number of leading tokens of each row that are attended to."""
        prompts = [request.prompt for request in self.requests]
        return np.array([len(one.token_ids) if one.attended is None else one.attended for one in prompts])

    @cached_property
    def padded(self) -> Tensor:
        """The rows' ids, masks and segments, padded on the right to the longest: int64, [3, rows, tokens].

        One buffer, so that there is one copy to the device instead of three, when they are first used.
        """
        prompts = [request.prompt for request in self.requests]
        positions = np.arange(self.lengths.max())
        own = positions < self.lengths[:, None]
        buffer = host_buffer(own.size * 3 * 8, self.device)
        ids, attention, types = buffer.numpy().view(np.int64).reshape(3, *own.shape)
        ids[:] = self.pad_token_id
        ids[own] = np.concatenate([prompt.token_ids for prompt in prompts])
        attention[:] = positions < self.attended[:, None]
        types[:] = 0
        if any(prompt.type_ids is not None for prompt in prompts):
            types[own] = np.concatenate([type_ids_of(prompt) for prompt in prompts])
        return buffer.to(self.device, non_blocking=True).view(torch.int64).view(3, *own.shape)

    @property
    def input_ids(self) -> Tensor:
        """Padded ids, [rows, tokens] int64."""
        return self.padded[0]

    @property
    def attention_mask(self) -> Tensor:
        """1 for tokens that are attended to, else 0: [rows, tokens] int64."""
        return self.padded[1]

    @property
    def type_ids(self) -> Tensor:
        """Segments, [rows, tokens] int64."""
        return self.padded[2]

    @property
    def required_states(self) -> RowStates:
        """``states``, for heads with ``reads_states``: they are never ``None`` there."""
        assert self.states is not None  # noqa: S101
        return self.states

    def first_states(self) -> Tensor:
        """Return the state of each row's first token, [rows, hidden], or the logits of a model with its own head."""
        states = self.required_states
        return states.at(states.begins)

    def last_states(self) -> Tensor:
        """Return the state of each row's last token that is attended to, [rows, hidden]."""
        states = self.required_states
        return states.at(states.begins + self.attended - 1)

    def mean_states(self) -> Tensor:
        """Return the mean of each row's states, [rows, hidden] float32."""
        return self.required_states.means(np.zeros_like(self.lengths))

    def kept_states(self) -> tuple[Tensor, Indices]:
        """Return the states of the kept tokens of all rows, [tokens, width], and the number of each row's.

        A copy, unless all tokens are kept and packed.
        """
        states = self.required_states
        if all(request.prompt.kept is None for request in self.requests):
            return states.at(states.cells), states.lengths
        prompts = [request.prompt for request in self.requests]
        kept = [np.ones(len(one.token_ids), dtype=np.bool_) if one.kept is None else one.kept for one in prompts]
        counts = np.array([np.count_nonzero(of_row) for of_row in kept])
        return states.at(states.cells[np.concatenate(kept)]), counts

    def select(self, rows: Sequence[int]) -> "ForwardPass":
        """Return the rows at these indices, which may repeat; nothing is copied."""
        if list(rows) == list(range(len(self.requests))):
            return self
        return evolve(
            self,
            requests=[self.requests[row] for row in rows],
            states=None if self.states is None else self.states.select(rows),
            lengths=self.lengths[rows],
        )


def type_ids_of(prompt: RenderedPrompt) -> npt.NDArray[np.int32]:
    """Return a row's segments, zeros if it has none."""
    return np.zeros(len(prompt.token_ids), dtype=np.int32) if prompt.type_ids is None else prompt.type_ids


def overwrite_embeds(inputs: Tensor, requests: Sequence[PoolingRequest]) -> Tensor:
    """Overwrite rows of ``inputs`` [rows, tokens, width] with the token embeddings of the requests that have any."""
    for row, request in enumerate(requests):
        embeds = request.prompt.embeds
        if embeds is not None:
            inputs[row, : len(embeds)] = to_device(embeds, inputs.device)
    return inputs


Compute: TypeAlias = Callable[[ForwardPass], RowStates]
"""Maps rows to a backbone's output."""

PaddedCompute: TypeAlias = Callable[[ForwardPass], Tensor]
"""Maps padded rows to the output, [rows, longest, width], or [rows, width] for a model with one vector or logits per
row."""


@frozen(eq=False)
class Padded:
    """A ``Compute`` of a function that takes padded rows."""

    compute: PaddedCompute

    def __call__(self, forward: ForwardPass) -> RowStates:
        """Compute rows."""
        return RowStates.of_output(self.compute(forward), forward.lengths)
