"""A backbone that computes packed rows: one after the other, without padding.

The model's code is unchanged: it computes a single row, as long as all rows together, whose positions begin again with
every segment. What surrounds the transformer, such as a classifier's head, still gets padded rows: hooks pack the
inputs in front of the transformer and unpack its output.

Whether a model computes the same that way is not in its files. It is measured at load: rows of mixed lengths are
computed in both ways and compared.
"""

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from attrs import define, field, frozen
from torch import Tensor, nn

from trio_pool_serve.runner.backbone import Backbone
from trio_pool_serve.runner.cuda.varlen import CannotPackError, VarlenAttention
from trio_pool_serve.runner.forward_pass import ForwardPass, host_buffer
from trio_pool_serve.runner.probe import TOLERANCES, compute_rows, difference, probe_rows

PositionRule: TypeAlias = Literal["counted", "past padding"]
"""How a model numbers a row's positions. counted: 0, 1, 2 …. past padding: as RoBERTa does, from the padding token's id
plus 1, without counting padding tokens inside the row."""

POSITION_RULES: tuple[PositionRule, ...] = ("counted", "past padding")


@frozen(eq=False)
class Packing:
    """The indices from padded rows to packed rows and back.

    ``tokens`` [total] are the cells of the flattened padded rows that hold the packed tokens. ``cells`` [rows, longest]
    are the packed tokens of the padded rows' cells; padding has the index of the row's last token. ``positions`` is
    [1, total]. Segment i reaches from ``cu_seqlens[i]`` to ``cu_seqlens[i + 1]`` (int32, [rows + 1]); the longest has
    ``longest`` tokens.
    """

    tokens: Tensor
    cells: Tensor
    positions: Tensor
    cu_seqlens: Tensor
    longest: int


def pack(
    token_ids: Sequence[npt.NDArray[np.int32]], rule: PositionRule, *, pad_token_id: int, device: torch.device
) -> Packing:
    """Return the packing of rows, on the device."""
    lengths = np.array([len(row) for row in token_ids])
    rows, longest, total = len(lengths), int(lengths.max()), int(lengths.sum())
    buffer = host_buffer(8 * (2 * total + rows * longest) + 4 * (rows + 1), device)
    numbers = buffer[: -4 * (rows + 1)].view(torch.int64)
    places, positions, cells = numbers.numpy()[:total], numbers.numpy()[total:][:total], numbers.numpy()[2 * total :]
    cu_seqlens = buffer[-4 * (rows + 1) :].view(torch.int32).numpy()
    cu_seqlens[0] = 0
    np.cumsum(lengths, out=cu_seqlens[1:])
    columns = np.arange(longest)
    places[:] = np.flatnonzero(columns < lengths[:, None])
    begins = cu_seqlens[:-1].astype(np.int64)
    cells[:] = (begins[:, None] + np.minimum(columns, lengths[:, None] - 1)).ravel()
    positions[:] = np.arange(total) - np.repeat(begins, lengths)
    if rule == "past padding":
        counts = (np.concatenate(token_ids) != pad_token_id).astype(np.int64)
        counted = np.cumsum(counts)
        positions[:] = (counted - np.repeat(counted[begins] - counts[begins], lengths)) * counts + pad_token_id
    on_device = buffer.to(device, non_blocking=True)
    numbers = on_device[: -4 * (rows + 1)].view(torch.int64)
    return Packing(
        tokens=numbers[:total],
        positions=numbers[total : 2 * total][None],
        cells=numbers[2 * total :].view(rows, longest),
        cu_seqlens=on_device[-4 * (rows + 1) :].view(torch.int32),
        longest=longest,
    )


PROBE_TOKENS = 64
"""Length of the probe's longest row; twice the sliding window if that is longer, up to ``MAX_PROBE_TOKENS``."""

MAX_PROBE_TOKENS = 4096


@define(eq=False)
class PackedBackbone:
    """A backbone whose transformer computes packed rows, for plain texts; other rows are computed padded."""

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
            raise CannotPackError("its model is not a transformers model")
        self._signature = inspect.signature(self._transformer.forward)
        if "position_ids" not in self._signature.parameters:
            raise CannotPackError("its positions cannot be given")
        self._remove_hooks = (
            self._transformer.register_forward_pre_hook(self._pack_inputs, with_kwargs=True).remove,
            self._transformer.register_forward_hook(self._unpack_output).remove,
        )

    def __call__(self, forward: ForwardPass) -> Tensor:
        """Return what ``backbone`` returns."""
        prompts = [request.prompt for request in forward.requests]
        if any(prompt.embeds is not None or prompt.attended is not None for prompt in prompts):
            return self.backbone(forward)
        config = self._transformer.config
        padded = config._attn_implementation  # noqa: SLF001  (the only way to change the function for one call)
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
        """Remove the hooks from the model."""
        for remove in self._remove_hooks:
            remove()

    def _pack_inputs(
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
            "cu_seq_lens_q": packing.cu_seqlens,
            "cu_seq_lens_k": packing.cu_seqlens,
            "max_length_q": packing.longest,
            "max_length_k": packing.longest,
        }
        return (), inputs

    def _unpack_output(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
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
    """Return a packed backbone whose output agrees with that of ``backbone``.

    Raises ``CannotPackError`` for models that read images, for models whose code does not call registered attention
    functions, and if the output differs by more than ``TOLERANCES`` or a row's output depends on other rows.
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
        raise CannotPackError(f"its code does not support packed rows: {error!r}") from error
    return packed


@torch.inference_mode()
def _choose_rule(packed: PackedBackbone, *, max_tokens: int, device: torch.device) -> None:
    model: Any = packed.backbone.model
    config = model.config.get_text_config()
    window = getattr(config, "sliding_window", None) or 0
    if MAX_PROBE_TOKENS < 2 * window < 2 * max_tokens:
        raise CannotPackError("its sliding window is too long to be compared")
    longest = min(max_tokens, max(PROBE_TOKENS, 2 * window), MAX_PROBE_TOKENS)
    embedding = model.get_input_embeddings()
    rows = probe_rows(embedding.num_embeddings, (max(1, longest // 2), longest, 1, max(1, longest // 3)))
    rows[1][longest // 2] = packed.pad_token_id  # distinguishes the rules
    outputs_of = partial(compute_rows, pad_token_id=packed.pad_token_id, device=device)
    expected = outputs_of(packed.backbone, rows)
    differences = {}
    for rule in POSITION_RULES:
        # An index past the end of the position table is a CUDA error, after which the GPU computes nothing more.
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
        raise CannotPackError("its rows depend on one another")
