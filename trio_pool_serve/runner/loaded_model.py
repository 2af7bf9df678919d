"""What a kind of model's loader returns: the transformer without heads, and its heads."""

import inspect
from collections.abc import Mapping
from contextlib import ExitStack
from functools import cached_property
from typing import Any, Literal, TypeAlias

import torch
from attrs import frozen
from torch import Tensor, nn
from transformers.utils.generic import ModelOutput

from trio_pool_serve.runner.forward_pass import ForwardPass, Head, overwrite_embeds
from trio_pool_serve.runner.row_states import RowStates
from trio_pool_serve.runner.transformer_masks import masks_of

Output: TypeAlias = Literal["last_hidden_state", "logits"]


@frozen(eq=False)
class Backbone:
    """A transformers model, and which of its outputs the heads take. It computes padded rows."""

    model: Any
    """An ``nn.Module``, of which transformers' names are used, too."""
    output: Output = "last_hidden_state"

    def __call__(self, forward: ForwardPass) -> RowStates:
        """Return the states of rows."""
        return RowStates.of_output(self.output_of(forward), forward.lengths)

    def output_of(self, forward: ForwardPass) -> Tensor:
        """Return the output for rows: [rows, longest, …] or, with one vector or logits per row, [rows, width]."""
        inputs: dict[str, Any] = {"attention_mask": forward.attention_mask}
        if forward.has_embeds:
            inputs["inputs_embeds"] = overwrite_embeds(self.embed(forward.input_ids), forward.requests)
        else:
            inputs["input_ids"] = forward.input_ids
        if self.takes_type_ids and any(request.prompt.type_ids is not None for request in forward.requests):
            inputs["token_type_ids"] = forward.type_ids
        with masks_of(forward):
            computed: Tensor = getattr(self.model(**inputs), self.output)
        return computed

    def first_not_finite(self, forward: ForwardPass) -> str:
        """Return the name of the first module with an output that is not finite; empty if all outputs are finite."""
        names = {module: name for name, module in self.model.named_modules()}
        found = [""]

        def note(module: nn.Module, _: object, output: Any) -> None:
            tensor = output[0] if isinstance(output, tuple | ModelOutput) else output
            if not found[0] and isinstance(tensor, Tensor) and not tensor.isfinite().all():
                found[0] = names[module]

        with ExitStack() as hooks:
            for module in names:
                hooks.enter_context(module.register_forward_hook(note))
            self(forward)
        return found[0]

    def forward_ids(self, input_ids: Tensor, attention_mask: Tensor, type_ids: Tensor) -> Tensor:
        """Return the output for ids [rows, tokens], always with a mask, and with segments if the model takes them.

        The control flow does not depend on the tensors' values, so this can be compiled and captured.
        """
        inputs = {"input_ids": input_ids, "attention_mask": attention_mask}
        if self.takes_type_ids:
            inputs["token_type_ids"] = type_ids
        computed: Tensor = getattr(self.model(**inputs), self.output)
        return computed

    def embed(self, token_ids: Tensor) -> Tensor:
        """Return the model's own embeddings of token ids: [rows, tokens] to [rows, tokens, ``embeds_width``]."""
        assert self._embedding is not None  # noqa: S101
        embedded: Tensor = self._embedding(token_ids)
        return embedded

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        return int(self.model.get_input_embeddings().num_embeddings)

    @property
    def embeds_width(self) -> int:
        """Width of the token embeddings that the forward pass accepts in place of ids; 0 if it accepts none."""
        return 0 if self._embedding is None else self._embedding.embedding_dim

    @cached_property
    def _embedding(self) -> nn.Embedding | None:
        if "inputs_embeds" not in self._arguments:
            return None
        try:
            embedding = self.model.get_input_embeddings()
        except (AttributeError, NotImplementedError):
            return None
        return embedding if isinstance(embedding, nn.Embedding) else None

    @cached_property
    def takes_type_ids(self) -> bool:
        """Whether the model has segments; many have none, although their tokenizers return type ids."""
        return "token_type_ids" in self._arguments

    @cached_property
    def _arguments(self) -> frozenset[str]:
        return frozenset(inspect.signature(self.model.forward).parameters)

    @property
    def parameters(self) -> int:
        """Number of parameters."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    @property
    def weight_bytes(self) -> int:
        """Bytes of all parameters."""
        return sum(parameter.nbytes for parameter in self.model.parameters())

    @property
    def embedding_parameters(self) -> int:
        """Number of parameters that are looked up instead of multiplied with."""
        return sum(module.weight.numel() for module in self.model.modules() if isinstance(module, nn.Embedding))


@frozen(kw_only=True, eq=False)
class LoadingParams:
    """How to load and compute: device, dtype, and whether code in the model's folder may be run.

    Rows have at most ``max_tokens`` tokens, and are padded with ``pad_token_id``.
    """

    device: torch.device
    dtype: torch.dtype
    trust_remote_code: bool = False
    pad_token_id: int
    max_tokens: int


@frozen(kw_only=True, eq=False)
class LoadedModel:
    """A model on its device, ready to compute.

    ``heads`` maps each class of ``PoolingParams`` to the head that serves it. ``description`` names the heads' outputs,
    for the log. ``output_width`` is the width of the backbone's output per token if it is much larger than a hidden
    state (logits over a vocabulary), so that batches have to be smaller; else 0. ``modules`` are all modules by name,
    if the heads have some that the backbone does not have.
    """

    backbone: Backbone
    heads: Mapping[type[Any], Head]
    description: str
    output_width: int = 0
    modules: Mapping[str, nn.Module] | None = None
