"""The transformer itself: token ids to what its heads read."""

import inspect
from functools import cached_property
from typing import Any, Literal, TypeAlias

import torch
from attrs import frozen
from torch import Tensor, nn

from trio_pool_serve.runner.forward_pass import ForwardPass

Output: TypeAlias = Literal["last_hidden_state", "logits"]


@frozen(eq=False)
class Backbone:
    """A transformers model, and which of its outputs the heads read."""

    model: nn.Module
    output: Output = "last_hidden_state"

    def __call__(self, forward: ForwardPass) -> Tensor:
        """Return the output for each row: [rows, tokens, …] or, for a row's own logits, [rows, labels]."""
        inputs: dict[str, Any] = {"input_ids": forward.input_ids, "attention_mask": forward.attention_mask}
        if self._takes_type_ids and any(request.prompt.type_ids is not None for request in forward.requests):
            inputs["token_type_ids"] = forward.type_ids
        computed = getattr(self.model(**inputs), self.output)
        assert isinstance(computed, torch.Tensor)  # noqa: S101
        return computed

    @cached_property
    def _takes_type_ids(self) -> bool:
        """Many models have no segments, though their tokenizers number them."""
        return "token_type_ids" in inspect.signature(self.model.forward).parameters

    @property
    def parameters(self) -> int:
        """How many numbers the model has learnt."""
        return sum(parameter.numel() for parameter in self.model.parameters())
