"""A backbone that computes no padding.

A model needs no change for that: it sees one row as long as all together, whose positions begin anew with every
segment. What surrounds the transformer, such as a classifier's head, still sees padded rows: hooks put the tokens
together in front of it and take them apart behind it.

Whether a model computes the same that way cannot be told from its files. It is asked: rows of mixed lengths are
computed both ways when it is loaded.
"""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from attrs import define, field
from torch import Tensor, nn

from trio_pool_serve.runner.backbone import Backbone
from trio_pool_serve.runner.cuda.packing import POSITION_RULES, Packing, PositionRule, pack
from trio_pool_serve.runner.cuda.varlen import CannotPackError, VarlenAttention
from trio_pool_serve.runner.forward_pass import ForwardPass
from trio_pool_serve.runner.probe import TOLERANCES, computed, difference, probe_rows

PROBE_TOKENS = 64
"""In the longest row of the probe, or as many as reach past a sliding window."""

MAX_PROBE_TOKENS = 4096


@define(eq=False)
class PackedBackbone:
    """A backbone whose transformer computes no padding, for rows that are plain texts; others are padded as ever."""

    backbone: Backbone
    attention: VarlenAttention
    pad_token_id: int
    rule: PositionRule = "counted"
    _transformer: Any = field(init=False)
    _signature: inspect.Signature = field(init=False)
    _packing: Packing | None = field(default=None, init=False)
    _remove_hooks: tuple[Callable[[], None], ...] = field(default=(), init=False)

    def __attrs_post_init__(self) -> None:
        self._transformer = getattr(self.backbone.model, "base_model", None)
        if self._transformer is None:
            raise CannotPackError("its model is not one of transformers'")
        self._signature = inspect.signature(self._transformer.forward)
        if "position_ids" not in self._signature.parameters:
            raise CannotPackError("its positions cannot be given")
        self._remove_hooks = (
            self._transformer.register_forward_pre_hook(self._put_together, with_kwargs=True).remove,
            self._transformer.register_forward_hook(self._take_apart).remove,
        )

    def __call__(self, forward: ForwardPass) -> Tensor:
        """Return what ``backbone`` returns."""
        prompts = [request.prompt for request in forward.requests]
        if any(prompt.embeds is not None or prompt.attended is not None for prompt in prompts):
            return self.backbone(forward)
        config = self._transformer.config
        padded = config._attn_implementation  # noqa: SLF001  (the only way to another function for a single call)
        self._packing = pack(
            [prompt.token_ids for prompt in prompts],
            self.rule,
            pad_token_id=self.pad_token_id,
            device=forward.input_ids.device,
        )
        config._attn_implementation = self.attention  # noqa: SLF001
        try:
            return self.backbone(forward)
        finally:
            config._attn_implementation = padded  # noqa: SLF001
            self._packing = None

    def close(self) -> None:
        """Take the hooks off the model."""
        for remove in self._remove_hooks:
            remove()

    def _put_together(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        packing = self._packing
        if packing is None:
            return None
        del module
        inputs = self._signature.bind(*args, **kwargs).arguments
        inputs |= inputs.pop("kwargs", {})
        for name in ("input_ids", "token_type_ids"):
            if inputs.get(name) is not None:
                inputs[name] = inputs[name].flatten()[packing.tokens][None]
        inputs |= {
            "attention_mask": None,
            "position_ids": packing.positions,
            "cu_seq_lens_q": packing.bounds,
            "cu_seq_lens_k": packing.bounds,
            "max_length_q": packing.longest,
            "max_length_k": packing.longest,
        }
        return (), inputs

    def _take_apart(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        del args
        if self._packing is None:
            return None
        output.last_hidden_state = output.last_hidden_state[0][self._packing.cells]
        if module is not self.backbone.model and output.get("pooler_output") is not None:
            output.pooler_output = module.pooler(output.last_hidden_state)  # type: ignore[operator]
        return output


def pack_backbone(
    backbone: Backbone, attention: VarlenAttention, *, pad_token_id: int, max_tokens: int, device: torch.device
) -> PackedBackbone:
    """Return a backbone that computes no padding, and gives what ``backbone`` gives.

    Raises ``CannotPackError`` if there is none: for models that see, for those whose code hands no functions of
    ours over, and for those that differ by more than ``TOLERANCES``, or let one row read another.
    """
    if type(backbone) is not Backbone:
        raise CannotPackError("it reads images")
    packed = PackedBackbone(backbone, attention, pad_token_id)
    try:
        _choose_rule(packed, max_tokens=max_tokens, device=device)
    except CannotPackError:
        packed.close()
        raise
    except Exception as error:
        packed.close()
        raise CannotPackError(f"its code does not take it: {error!r}") from error
    return packed


@torch.inference_mode()
def _choose_rule(packed: PackedBackbone, *, max_tokens: int, device: torch.device) -> None:
    model: Any = packed.backbone.model
    config = model.config.get_text_config()
    window = getattr(config, "sliding_window", None) or 0
    if MAX_PROBE_TOKENS < 2 * window < 2 * max_tokens:
        raise CannotPackError("its window is too long to be compared")
    longest = min(max_tokens, max(PROBE_TOKENS, 2 * window), MAX_PROBE_TOKENS)
    embedding = model.get_input_embeddings()
    rows = probe_rows(embedding.num_embeddings, (max(1, longest // 2), longest, 1, max(1, longest // 3)))
    rows[1][longest // 2] = packed.pad_token_id  # tells the rules apart
    outputs_of = partial(computed, pad_token_id=packed.pad_token_id, device=device)
    expected = outputs_of(packed.backbone, rows)
    differences = {}
    for rule in POSITION_RULES:
        # A position past the table's end would end all computing on a GPU.
        past = packed.pad_token_id + longest >= (getattr(config, "max_position_embeddings", None) or 0)
        if rule == "counted" or not past:
            packed.rule = rule
            differences[rule] = difference(outputs_of(packed, rows), expected)
    packed.rule = min(differences, key=differences.__getitem__)
    if not differences[packed.rule] <= TOLERANCES[embedding.weight.dtype]:
        raise CannotPackError(f"its states differ by {differences[packed.rule]:.2g}")
    others = [rows[0], *(row[::-1].copy() for row in rows[1:])]
    first, again = (outputs_of(packed, some)[0] for some in (rows, others))
    if not torch.equal(first, again):
        raise CannotPackError("its rows read one another")
