"""A backbone that computes packed rows: one after the other, without padding.

The model's code is unchanged: it computes a single row, as long as all rows together, whose positions begin again with
every segment. A hook adds positions and segments' bounds to the transformer's inputs. Heads read packed states; a head
that is part of the model, and gives one row of logits for each input, gets the first token of each.

Whether a model computes the same that way is not in its files. It is measured at load: rows of mixed lengths are
computed in both ways and compared.
"""

import inspect
import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from attrs import define, field
from torch import Tensor, nn
from torch.nn import attention

from trio_pool_serve.errors import require
from trio_pool_serve.runner.comparison import accepts_embeds, difference, probe_rows, states_of, tolerance_of
from trio_pool_serve.runner.cuda.packed_inputs import POSITION_RULES, PackedInputs, PositionRule, fill, shape_of
from trio_pool_serve.runner.cuda.varlen import VARLEN, CannotPackError, faster_kernels
from trio_pool_serve.runner.forward_pass import Compute, ForwardPass
from trio_pool_serve.runner.loaded_model import Backbone, LoadingParams
from trio_pool_serve.runner.row_states import RowStates, concatenate
from trio_pool_serve.runner.torch_device import to_device
from trio_pool_serve.types import RenderedPrompt

logger = logging.getLogger(__name__)

PROBE_TOKENS = 64
"""Length of the probe's longest row; twice the sliding window if that is longer, up to ``MAX_PROBE_TOKENS``."""

MAX_PROBE_TOKENS = 4096


@define(eq=False)
class PackedBackbone:
    """A backbone whose transformer computes packed rows; rows that are not attended to as a whole are padded."""

    backbone: Backbone
    pad_token_id: int
    rule: PositionRule = "counted"
    takes_embeds: bool = False
    """Whether rows of token embeddings are packed, too."""
    fused: "PackedBackbone | None" = field(default=None, init=False)
    """The same model, compiled: computes rows without embeddings and adapters, once it is there."""
    _transformer: Any = field(init=False)
    _signature: inspect.Signature = field(init=False)
    _inputs: PackedInputs | None = field(default=None, init=False)
    _remove_hooks: tuple[Callable[[], None], ...] = field(default=(), init=False)
    _gives_rows: bool = field(default=False, init=False)
    """Whether the model's output is one row of logits for each input."""

    def __attrs_post_init__(self) -> None:
        self._transformer = getattr(self.backbone.model, "base_model", None)
        require(self._transformer is not None, "its model is not a transformers model", CannotPackError)
        self._signature = inspect.signature(self._transformer.forward)
        require("position_ids" in self._signature.parameters, "its positions cannot be given", CannotPackError)
        self._remove_hooks = (
            self._transformer.register_forward_pre_hook(self._add_bounds, with_kwargs=True).remove,
            self._transformer.register_forward_hook(self._take_first_tokens).remove,
        )

    def __call__(self, forward: ForwardPass) -> RowStates:
        """Return the states of rows, as ``backbone`` does."""
        return self.divide(forward, self.compute_packed)

    def divide(self, forward: ForwardPass, compute_packed: Compute) -> RowStates:
        """Compute rows that can be packed by ``compute_packed``, and all others padded, in another pass."""
        padded = [row for row, request in enumerate(forward.requests) if not self.packs(request.prompt)]
        if not padded:
            return compute_packed(forward)
        packed = [row for row, request in enumerate(forward.requests) if self.packs(request.prompt)]
        apart = self.backbone(forward.select(padded))
        if not packed:
            return apart
        return concatenate([compute_packed(forward.select(packed)), apart], [packed, padded])

    def packs(self, prompt: RenderedPrompt) -> bool:
        """Return whether a row is computed packed."""
        return prompt.attended is None and (prompt.embeds is None or self.takes_embeds)

    def states_of(self, output: Tensor, forward: ForwardPass) -> RowStates:
        """Return the states of rows in an output of ``compute``, which may be larger."""
        if self._gives_rows:
            return RowStates.of_output(output[: len(forward.requests)], forward.lengths)
        return RowStates.packed(output, forward.lengths)

    def compute(self, inputs: PackedInputs, embeds: Sequence[tuple[int, Tensor]] = ()) -> Tensor:
        """Return the output [tokens, width], or [rows, width] for a model with one row of logits for each input.

        ``embeds`` are token embeddings, and where each begins. Without any, the control flow does not depend on the
        tensors' values, so that this can be captured.
        """
        config = self._transformer.config
        padded = config._attn_implementation  # noqa: SLF001  (the only way to change the function for one call)
        arguments: dict[str, Any] = {"attention_mask": None}
        if embeds:
            arguments["inputs_embeds"] = embedded = self.backbone.embed(inputs.ids)
            for begin, of_row in embeds:
                embedded[0, begin : begin + len(of_row)] = of_row
        else:
            arguments["input_ids"] = inputs.ids
        if self.backbone.takes_type_ids:
            arguments["token_type_ids"] = inputs.segments
        self._inputs = inputs
        config._attn_implementation = VARLEN  # noqa: SLF001
        try:
            output: Tensor = getattr(self.backbone.model(**arguments), self.backbone.output)
        finally:
            config._attn_implementation = padded  # noqa: SLF001
            self._inputs = None
        return output if output.dim() == 2 else output[0]

    def close(self) -> None:
        """Remove the hooks from the model."""
        for remove in self._remove_hooks:
            remove()

    def compute_packed(self, forward: ForwardPass) -> RowStates:
        """Compute rows that can be packed."""
        shape = shape_of(forward.lengths)
        # The compiler has taken sizes of one for constants.
        if self.fused and shape.longest > 1 and not (forward.has_embeds or forward.has_adapter):
            return self.fused.compute_packed(forward)
        buffer = fill(shape, forward, self.rule).to(forward.device, non_blocking=True)
        begins = (np.cumsum(forward.lengths) - forward.lengths).tolist()
        embeds = [
            (begin, to_device(request.prompt.embeds, forward.device))
            for begin, request in zip(begins, forward.requests, strict=True)
            if request.prompt.embeds is not None
        ]
        return self.states_of(self.compute(PackedInputs.of_buffer(shape, buffer), embeds), forward)

    def _add_bounds(
        self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        inputs = self._inputs
        if inputs is None:
            return None
        arguments = self._signature.bind(*args, **kwargs).arguments
        arguments |= arguments.pop("kwargs", {})
        arguments |= {
            "attention_mask": None,
            "position_ids": inputs.positions,
            "cu_seq_lens_q": inputs.begins,
            "cu_seq_lens_k": inputs.begins,
            "max_length_q": inputs.shape.longest,
            "max_length_k": inputs.shape.longest,
        }
        return (), arguments

    def _take_first_tokens(self, module: nn.Module, _: tuple[Any, ...], output: Any) -> Any:
        inputs = self._inputs
        if inputs is None or not self._gives_rows:
            return None
        # Rows that a shape has left begin at its end.
        firsts = inputs.begins[:-1].clamp(max=inputs.shape.tokens - 1)
        output.last_hidden_state = output.last_hidden_state[0].index_select(0, firsts)[:, None]
        if module is not self.backbone.model and output.get("pooler_output") is not None:
            output.pooler_output = module.pooler(output.last_hidden_state)  # type: ignore[operator]
        return output

    @torch.inference_mode()
    def fit(self, oracle: Backbone, *, max_tokens: int, device: torch.device) -> None:
        """Set the model's numbering of positions, its output and its inputs, by comparing with ``oracle``.

        Raises ``CannotPackError`` if the outputs differ in every way.
        """
        model: Any = self.backbone.model
        config = model.config.get_text_config()
        window = getattr(config, "sliding_window", None) or 0
        require(
            not MAX_PROBE_TOKENS < 2 * window < 2 * max_tokens,
            "its sliding window is too long to be compared",
            CannotPackError,
        )
        longest = min(max_tokens, max(PROBE_TOKENS, 2 * window), MAX_PROBE_TOKENS)
        embedding = model.get_input_embeddings()
        rows = probe_rows(embedding.num_embeddings, (max(1, longest // 2), longest, 1, max(1, longest // 3)))
        rows[1][longest // 2] = self.pad_token_id  # distinguishes the rules
        prompts = [RenderedPrompt(row) for row in rows]
        outputs_of = partial(states_of, pad_token_id=self.pad_token_id, device=device)
        expected = outputs_of(oracle, prompts)
        self._gives_rows = len(expected[1]) == 1 < longest
        # An index past the end of the position table is a CUDA error, after which the GPU computes nothing more.
        past = self.pad_token_id + longest >= (getattr(config, "max_position_embeddings", None) or 0)
        differences = {}
        for rule in POSITION_RULES[:1] if past else POSITION_RULES:
            self.rule = rule
            differences[rule] = difference(outputs_of(self, prompts), expected)
        self.rule = min(differences, key=differences.__getitem__)
        tolerance = tolerance_of(self.backbone)
        require(
            differences[self.rule] <= tolerance, f"its states differ by {differences[self.rule]:.2g}", CannotPackError
        )
        # The first row and the last are the same. A causal convolution mixes a row only into later ones.
        between = (rows[1][::-1], (rows[2] + 1) % embedding.num_embeddings)
        others = [prompts[0], *(RenderedPrompt(row.copy()) for row in between), prompts[-1]]
        as_before, again = (outputs_of(self, some) for some in (prompts, others))
        require(
            all(torch.equal(as_before[row], again[row]) for row in (0, -1)),
            "its rows depend on one another",
            CannotPackError,
        )
        if self.backbone.embeds_width:
            self.takes_embeds = True
            without_padding = [row[row != self.pad_token_id] for row in rows[2:]]  # some models know it by its id
            of_ids = outputs_of(oracle, [*map(RenderedPrompt, without_padding)])
            self.takes_embeds = accepts_embeds(
                self, oracle, without_padding, of_ids, tolerance, pad_token_id=self.pad_token_id, device=device
            )


def pack_backbone(backbone: Backbone, params: LoadingParams, oracle: Backbone | None = None) -> PackedBackbone:
    """Return a packed backbone whose output agrees with that of ``oracle``, by default of ``backbone``.

    Raises ``CannotPackError`` for models whose code does not call registered attention functions, and if the output
    differs by more than ``tolerance_of`` it or a row's output depends on other rows.
    """
    packed = PackedBackbone(backbone, params.pad_token_id)
    try:
        packed.fit(oracle or backbone, max_tokens=params.max_tokens, device=params.device)
    except Exception as error:
        packed.close()
        if isinstance(error, CannotPackError):
            raise
        raise CannotPackError(f"its code does not support packed rows: {error!r}") from error
    return packed


def pack_with_fastest_attention(backbone: Backbone, params: LoadingParams) -> tuple[PackedBackbone, str]:
    """Return a packed backbone, and the name of its kernel; "" on CPU. Raises ``CannotPackError`` as ``pack_backbone``.

    It is the fastest kernel for the device whose package is installed and with which the output agrees. The whole
    process uses it from then on, so later models have the choice of the first one.
    """
    for name in () if _kernel else faster_kernels(params.device):
        try:
            attention.activate_flash_attention_impl(name)
            packed = pack_backbone(backbone, params)
        except Exception as error:
            logger.info("attention is not computed by %s: %s", name, error)
            if attention.current_flash_attention_impl() is not None:
                attention.restore_flash_attention_impl()
        else:
            _kernel.append(name)
            return packed, name
    packed = pack_backbone(backbone, params)
    if params.device.type == "cpu":
        return packed, ""
    if not _kernel:
        _kernel.append("FA2")
    return packed, _kernel[0]


_kernel: list[str] = []
"""The kernel of this process, once a model has chosen it."""
