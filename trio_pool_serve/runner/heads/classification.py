"""Numbers per label, for a row or for each of its tokens."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch
from attrs import frozen
from torch import Tensor, nn

from trio_pool_serve.runner.forward_pass import ForwardPass
from trio_pool_serve.runner.heads.embedding import kept_tokens
from trio_pool_serve.runner.heads.interface import HeadRows
from trio_pool_serve.types import Activation, Classify, PooledValue, TokenClassify

ActivationFunctions = Mapping[Activation, Callable[[Tensor], Tensor]]
"""What each ``Activation`` means for one model: logits [rows, …, labels] → the same shape."""


def softmax(logits: Tensor) -> Tensor:
    """Over the labels, the last dimension."""
    return logits.softmax(dim=-1)


def raw(logits: Tensor) -> Tensor:
    """Nothing."""
    return logits


def _activate(logits: Tensor, activations: Sequence[Activation], functions: ActivationFunctions) -> Tensor:
    """Apply to each row of logits [rows, …] the activation it asked for."""
    logits = logits.float()
    if len(set(activations)) == 1:
        return functions[activations[0]](logits)
    return torch.stack([functions[name](row) for name, row in zip(activations, logits, strict=True)])


@frozen(eq=False)
class ClassificationHead:
    """``Classify``: from the model's output to one logit per label, and its activation.

    ``logits`` maps a forward pass to [rows, labels].
    """

    logits: Callable[[ForwardPass], Tensor]
    functions: ActivationFunctions
    reads_states = True

    def __call__(self, forward: ForwardPass, params: Sequence[Classify]) -> HeadRows:
        """Return rows [rows, labels]."""
        rows = _activate(self.logits(forward), [param.activation for param in params], self.functions)
        return HeadRows(rows, list)


@frozen(eq=False)
class TokenClassificationHead:
    """``TokenClassify``: one row of labels for each kept token.

    ``logits`` maps a forward pass to [rows, tokens, labels]. With ``step_token_id`` only the positions of that
    token count: the ends of the steps that a process reward model judges.
    """

    logits: Callable[[ForwardPass], Tensor]
    functions: ActivationFunctions
    step_token_id: int | None = None
    reads_states = True

    def __call__(self, forward: ForwardPass, params: Sequence[TokenClassify]) -> HeadRows:
        """Return rows [rows, tokens, labels]."""
        rows = _activate(self.logits(forward), [param.activation for param in params], self.functions)

        def split(array: npt.NDArray[np.float32]) -> list[PooledValue]:
            return [
                kept_tokens(row, request.tokens, self._kept(request.prompt.token_ids, request.prompt.kept))
                for row, request in zip(array, forward.requests, strict=True)
            ]

        return HeadRows(rows, split)

    def _kept(
        self, token_ids: npt.NDArray[np.int32], kept: npt.NDArray[np.bool_] | None
    ) -> npt.NDArray[np.bool_] | None:
        if self.step_token_id is None:
            return kept
        steps: npt.NDArray[np.bool_] = token_ids == self.step_token_id
        return steps


def output_of(forward: ForwardPass) -> Tensor:
    """Return what the model's own head has made: its logits."""
    return forward.computed


def last_token(states: Tensor, attention_mask: Tensor) -> Tensor:
    """Return the state of each row's last token: [rows, tokens, hidden] → [rows, hidden]."""
    last = attention_mask.sum(dim=1) - 1
    return states[torch.arange(len(states), device=states.device), last]


@frozen(eq=False)
class LastTokenLogits:
    """A decoder's classifier: a linear layer on the last token's state."""

    score: nn.Module

    def __call__(self, forward: ForwardPass) -> Tensor:
        """Return logits [rows, labels]."""
        rows: Tensor = self.score(last_token(forward.computed, forward.attention_mask))
        return rows


@frozen(eq=False)
class YesNoLogits:
    """A generative reranker's judgement: by how much it would rather say yes than no.

    ``logit(yes) − logit(no)`` at the last position, which is the log-odds once only those two words count. Without
    ``no`` it is the logit of yes alone. ``language_head`` maps [rows, hidden] to [rows, vocabulary].
    """

    language_head: nn.Linear
    yes: int
    no: int | None
    softcap: float | None = None

    def __call__(self, forward: ForwardPass) -> Tensor:
        """Return one logit per row, [rows, 1]."""
        words = [self.yes] if self.no is None else [self.yes, self.no]
        states = last_token(forward.computed, forward.attention_mask)
        bias = None if self.language_head.bias is None else self.language_head.bias[words]
        logits = nn.functional.linear(states, self.language_head.weight[words], bias).float()
        if self.softcap is not None:
            logits = (logits / self.softcap).tanh() * self.softcap
        return logits[:, :1] if self.no is None else logits[:, :1] - logits[:, 1:]


@frozen(eq=False)
class WordLogits:
    """A process reward model made of a language model: the logits of a few words at every position."""

    language_head: nn.Linear
    words: Sequence[int]

    def __call__(self, forward: ForwardPass) -> Tensor:
        """Return logits [rows, tokens, words]."""
        return nn.functional.linear(forward.computed, self.language_head.weight[list(self.words)])
