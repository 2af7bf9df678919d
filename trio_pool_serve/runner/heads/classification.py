"""Heads that give one number per label, for a row or for each of its tokens."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Protocol, TypeAlias

import torch
from attrs import frozen
from torch import Tensor, nn

from trio_pool_serve.errors import ModelLoadError
from trio_pool_serve.runner.batch_rows import Indices
from trio_pool_serve.runner.forward_pass import ForwardPass, HeadRows
from trio_pool_serve.runner.heads.embedding import split_tokens
from trio_pool_serve.types import Activation, Classify, TokenClassify

ActivationFunction: TypeAlias = Callable[[Tensor], Tensor]

ActivationFunctions = Mapping[Activation, ActivationFunction]
"""The function of each ``Activation`` for one model: logits [rows, …, labels] to the same shape."""


softmax: ActivationFunction = partial(torch.softmax, dim=-1)

identity: ActivationFunction = nn.Identity()


def activation_functions(*, labels: int, problem_type: str | None, score_activation: str) -> ActivationFunctions:
    """Return a classifier's activations: ``probabilities`` as in transformers' pipelines, ``score`` by dotted name."""
    if problem_type == "regression":
        probabilities: ActivationFunction = identity
    elif problem_type == "multi_label_classification" or labels == 1:
        probabilities = torch.sigmoid
    else:
        probabilities = softmax
    return {"probabilities": probabilities, "score": _activation_named(score_activation), "raw": identity}


def _activation_named(dotted: str) -> ActivationFunction:
    """Return one of torch.nn's activations. Raises ``ModelLoadError`` for anything else."""
    module_class = getattr(nn, dotted.rpartition(".")[2], None) if dotted.startswith("torch.nn.") else None
    if not (isinstance(module_class, type) and issubclass(module_class, nn.Module)):
        raise ModelLoadError(f"The activation function {dotted} is not one of torch.nn's.")
    if module_class is nn.Softmax:
        return softmax  # along the last dimension, which torch wants to be told
    try:
        return module_class()
    except TypeError as error:
        raise ModelLoadError(f"{dotted} is not an activation function: {error}") from error


def _activate(
    logits: Tensor, activations: Sequence[Activation], functions: ActivationFunctions, repeats: Indices | None = None
) -> Tensor:
    """Apply each activation to its row of logits [rows, labels], or to its ``repeats`` consecutive rows."""
    logits = logits.float()
    if len(set(activations)) == 1:
        return functions[activations[0]](logits)
    parts = torch.split(logits, 1 if repeats is None else repeats.tolist())
    return torch.cat([functions[name](part) for name, part in zip(activations, parts, strict=True)])


@frozen(eq=False)
class ClassificationHead:
    """The head of ``Classify``: one logit per label, then the activation.

    ``logits`` maps rows to [rows, labels].
    """

    logits: "RowLogits"
    functions: ActivationFunctions

    def __call__(self, forward: ForwardPass, params: Sequence[Classify]) -> HeadRows:
        """Return rows [rows, labels]."""
        return HeadRows(_activate(self.logits(forward), [param.activation for param in params], self.functions), list)


@frozen(eq=False)
class TokenClassificationHead:
    """The head of ``TokenClassify``: one row of labels for each kept token.

    ``logits`` maps states [tokens, hidden] float32 to [tokens, labels]. With ``step_token_id`` only tokens with that id
    are kept: the ends of the steps that a process reward model scores.
    """

    logits: Callable[[Tensor], Tensor]
    functions: ActivationFunctions
    step_token_id: int | None = None

    def __call__(self, forward: ForwardPass, params: Sequence[TokenClassify]) -> HeadRows:
        """Return rows [tokens, labels], input after input."""
        if self.step_token_id is None:
            states, counts = forward.kept_states()
        else:
            is_step = [request.prompt.token_ids == self.step_token_id for request in forward.requests]
            states, counts = forward.states_where(is_step)
        rows = _activate(self.logits(states.float()), [param.activation for param in params], self.functions, counts)
        return HeadRows(rows, lambda array: list(split_tokens(array, counts)))


class RowsOfStates(Protocol):
    """Rows whose states a classifier reads: a ``ForwardPass``, or the rows of a graph that is being traced."""

    def first_states(self) -> Tensor:
        """Return the state of each row's first token, [rows, hidden], or the logits of a model with its own head."""

    def last_states(self) -> Tensor:
        """Return the state of each row's last token that is attended to, [rows, hidden]."""

    def mean_states(self) -> Tensor:
        """Return the mean of each row's states, [rows, hidden] float32."""


RowLogits: TypeAlias = Callable[[RowsOfStates], Tensor]
"""Maps rows to logits [rows, labels]."""


class SelectedLogits(nn.Module):
    """Logits of a few tokens, ``token_ids``: their rows of a language model's head, in float32.

    ``softcap`` c bounds the logits as the model does: ``c · tanh(logit / c)``.
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

    words: Callable[[Tensor], Tensor]

    def __call__(self, rows: RowsOfStates) -> Tensor:
        """Return one logit per row, [rows, 1]."""
        logits = self.words(rows.last_states().float())
        return logits[:, :1] - logits[:, 1:] if logits.shape[1] == 2 else logits
