"""Heads that give one number per label, for a row or for each of its tokens."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeAlias

import torch
from attrs import frozen
from torch import Tensor, nn

from trio_pool_serve.errors import ModelLoadError
from trio_pool_serve.runner.batch_rows import Indices, RowState
from trio_pool_serve.runner.forward_pass import ForwardPass, HeadRows
from trio_pool_serve.runner.heads.embedding import split_tokens
from trio_pool_serve.runner.heads.pooling import Pooler
from trio_pool_serve.types import Activation, Classify, TokenClassify

Logits: TypeAlias = Callable[[Tensor], Tensor]
"""Maps states [rows or tokens, hidden] float32 to logits [rows or tokens, labels]."""

ActivationFunction: TypeAlias = Callable[[Tensor], Tensor]

ActivationFunctions = Mapping[Activation, ActivationFunction]
"""The function of each ``Activation`` for one model: logits [rows, …, labels] to the same shape."""


softmax: ActivationFunction = partial(torch.softmax, dim=-1)

identity: ActivationFunction = nn.Identity()


def activation_functions(names: Mapping[Activation, str]) -> ActivationFunctions:
    """Return a classifier's activations by their dotted names. Raises ``ModelLoadError``."""
    return {activation: activation_named(name) for activation, name in names.items()}


def activation_named(dotted: str) -> ActivationFunction:
    """Return one of torch.nn's activations. Raises ``ModelLoadError`` for anything else."""
    module_class = getattr(nn, dotted.rpartition(".")[2], None) if dotted.startswith("torch.nn.") else None
    if not (isinstance(module_class, type) and issubclass(module_class, nn.Module)):
        raise ModelLoadError(f"The activation function {dotted} is not a module of torch.nn.")
    if module_class is nn.Softmax:
        return softmax  # along the last dimension; torch requires its number
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
    """The head of ``Classify``: one logit per label, of one state of each row, then the activation."""

    state: RowState
    logits: Logits
    functions: ActivationFunctions

    def __call__(self, forward: ForwardPass, params: Sequence[Classify]) -> HeadRows:
        """Return rows [rows, labels]."""
        logits = self.logits(forward.row_states(self.state).float())
        return HeadRows(_activate(logits, [param.activation for param in params], self.functions), list)


@frozen(eq=False)
class PooledClassificationHead:
    """The head of ``Classify`` whose logits are the pooler's output, [rows, labels], then the activation."""

    pooler: Pooler
    functions: ActivationFunctions

    def __call__(self, forward: ForwardPass, params: Sequence[Classify]) -> HeadRows:
        """Return rows [rows, labels]."""
        logits = self.pooler(forward.required_states, forward.skipped)
        return HeadRows(_activate(logits, [param.activation for param in params], self.functions), list)


@frozen(eq=False)
class TokenClassificationHead:
    """The head of ``TokenClassify``: one row of labels for each kept token.

    With ``step_token_id`` only tokens with that id are kept: the ends of the steps that a process reward model scores.
    """

    logits: Logits
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
