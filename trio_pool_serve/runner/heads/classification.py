"""Heads that give one number per label, for a row or for each of its tokens."""

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from attrs import frozen
from torch import Tensor, nn

from trio_pool_serve.errors import ModelLoadError
from trio_pool_serve.runner.forward_pass import ForwardPass
from trio_pool_serve.runner.heads.embedding import kept_tokens
from trio_pool_serve.runner.heads.head import HeadRows
from trio_pool_serve.types import Activation, Classify, PooledValue, TokenClassify

ActivationFunction: TypeAlias = Callable[[Tensor], Tensor]

ActivationFunctions = Mapping[Activation, ActivationFunction]
"""The function of each ``Activation`` for one model: logits [rows, …, labels] to the same shape."""


def activation_functions(*, labels: int, problem_type: str | None, score_activation: str) -> ActivationFunctions:
    """Return a classifier's activations: ``probabilities`` as in transformers' pipelines, ``score`` by dotted name."""
    if problem_type == "regression":
        probabilities: ActivationFunction = identity
    elif problem_type == "multi_label_classification" or labels == 1:
        probabilities = torch.sigmoid
    else:
        probabilities = softmax
    return {"probabilities": probabilities, "score": _activation_named(score_activation), "raw": identity}


def softmax(logits: Tensor) -> Tensor:
    """Softmax over the labels, the last dimension."""
    return logits.softmax(dim=-1)


def identity(logits: Tensor) -> Tensor:
    """Return the logits unchanged."""
    return logits


def _activation_named(dotted: str) -> ActivationFunction:
    """Return one of torch.nn's activations. Raises ``ModelLoadError`` for anything else."""
    if not dotted.startswith("torch.nn."):
        raise ModelLoadError(f"The activation function {dotted} is not one of torch.nn's.")
    name = dotted.rpartition(".")[2]
    if name == "Softmax":
        return softmax
    module_class = getattr(nn, name, None)
    if not (isinstance(module_class, type) and issubclass(module_class, nn.Module)):
        raise ModelLoadError(f"The activation function {dotted} is not one of torch.nn's.")
    try:
        activation = module_class()
    except TypeError as error:
        raise ModelLoadError(f"{dotted} is not an activation function: {error}") from error
    return activation


def _activate(logits: Tensor, activations: Sequence[Activation], functions: ActivationFunctions) -> Tensor:
    """Apply to each row of logits [rows, …] its own activation."""
    logits = logits.float()
    if len(set(activations)) == 1:
        return functions[activations[0]](logits)
    return torch.stack([functions[name](row) for name, row in zip(activations, logits, strict=True)])


@frozen(eq=False)
class ClassificationHead:
    """The head of ``Classify``: one logit per label, then the activation.

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
    """The head of ``TokenClassify``: one row of labels for each kept token.

    ``logits`` maps a forward pass to [rows, tokens, labels]. With ``step_token_id`` only the tokens of
    that id are kept: the ends of the steps that a process reward model scores.
    """

    logits: Callable[[ForwardPass], Tensor]
    functions: ActivationFunctions
    step_token_id: int | None = None
    reads_states = True

    def __call__(self, forward: ForwardPass, params: Sequence[TokenClassify]) -> HeadRows:
        """Return rows [rows, tokens, labels]."""
        rows = _activate(self.logits(forward), [param.activation for param in params], self.functions)
        requests = forward.requests  # not ``forward``, whose tensors would live until the copy is done

        def split(array: npt.NDArray[np.float32]) -> list[PooledValue]:
            return [
                kept_tokens(row, request.tokens, self._kept(request.prompt.token_ids, request.prompt.kept))
                for row, request in zip(array, requests, strict=True)
            ]

        return HeadRows(rows, split)

    def _kept(
        self, token_ids: npt.NDArray[np.int32], kept: npt.NDArray[np.bool_] | None
    ) -> npt.NDArray[np.bool_] | None:
        if self.step_token_id is None:
            return kept
        steps: npt.NDArray[np.bool_] = token_ids == self.step_token_id
        return steps


def model_logits(forward: ForwardPass) -> Tensor:
    """Return the logits of the model's own head."""
    return forward.required_states


def last_token(states: Tensor, attention_mask: Tensor) -> Tensor:
    """Return the state of each row's last token: [rows, tokens, hidden] to [rows, hidden]."""
    last = attention_mask.sum(dim=1) - 1
    return states[torch.arange(len(states), device=states.device), last]


@frozen(eq=False)
class LastTokenLogits:
    """The logits of a decoder's classifier: ``score``, a linear layer in float32, on the last token's state."""

    score: nn.Module

    def __call__(self, forward: ForwardPass) -> Tensor:
        """Return logits [rows, labels]."""
        rows: Tensor = self.score(last_token(forward.required_states, forward.attention_mask).float())
        return rows


@frozen(eq=False)
class TokenLogits:
    """The logits of a token classifier: ``score``, in float32, on each token's state."""

    score: nn.Module

    def __call__(self, forward: ForwardPass) -> Tensor:
        """Return logits [rows, tokens, labels]."""
        rows: Tensor = self.score(forward.required_states.float())
        return rows


class SelectedLogits(nn.Module):
    """Logits of a few tokens: their rows of a language model's head, in float32.

    ``token_ids`` are those tokens. ``softcap`` c bounds the logits as the model does: ``c · tanh(logit / c)``.
    """

    weight: Tensor
    bias: Tensor | None

    def __init__(self, language_head: nn.Linear, token_ids: Sequence[int], softcap: float | None) -> None:
        super().__init__()
        rows = list(token_ids)
        bias = language_head.bias
        self.register_buffer("weight", language_head.weight[rows].detach().float().clone())
        self.register_buffer("bias", None if bias is None else bias[rows].detach().float().clone())
        self.softcap = softcap

    def forward(self, states: Tensor) -> Tensor:
        """Map states [rows, …, hidden] float32 to logits [rows, …, tokens]."""
        logits = nn.functional.linear(states, self.weight, self.bias)
        return logits if self.softcap is None else (logits / self.softcap).tanh() * self.softcap


@frozen(eq=False)
class YesNoLogits:
    """The score of a generative reranker: ``logit(yes) − logit(no)`` after the last token.

    That is the log-odds of yes among these two words. ``words`` gives both logits in this order, or the logit of yes
    alone, which then is the score.
    """

    words: SelectedLogits

    def __call__(self, forward: ForwardPass) -> Tensor:
        """Return one logit per row, [rows, 1]."""
        logits = self.words(last_token(forward.required_states, forward.attention_mask).float())
        score: Tensor = logits[:, :1] - logits[:, 1:] if logits.shape[1] == 2 else logits
        return score
