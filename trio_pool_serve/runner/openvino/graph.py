"""The conversion of a model from torch to one OpenVINO graph of backbone and heads, and its quantisation to int8."""

import io
import logging
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout
from functools import partial
from typing import Any

import openvino as ov
import torch
from attrs import define, frozen
from openvino.tools.ovc import convert_impl
from torch import Tensor, nn

from trio_pool_serve.runner.batch_rows import IDS, SELECTIONS, Rows
from trio_pool_serve.runner.heads.classification import (
    ActivationFunctions,
    ClassificationHead,
    PooledClassificationHead,
    TokenClassificationHead,
)
from trio_pool_serve.runner.heads.embedding import ChunkEmbeddingHead, EmbeddingHead, TokenEmbeddingHead
from trio_pool_serve.runner.heads.maxsim import MaxSimHead
from trio_pool_serve.runner.heads.pooling import Pooler
from trio_pool_serve.runner.heads.sparse import LatentHead, LexicalHead, SparseLookupHead, SpladeHead
from trio_pool_serve.runner.loaded_model import Backbone, LoadedModel
from trio_pool_serve.runner.openvino import heads
from trio_pool_serve.runner.openvino.adapted_graph import count_nodes
from trio_pool_serve.runner.transformer_masks import traceable_masks
from trio_pool_serve.telemetry.start_display import report_items
from trio_pool_serve.types import PoolingRequest, RenderedPrompt

# It would set the root logger's level during a conversion, and drop messages of other threads.
convert_impl.init_logger = lambda *_: None

TRACED_ROWS, TRACED_TOKENS = 2, 7
"""Shape of the example. Not 1, which is broadcast, and numbers that no configuration has."""


@define(eq=False)
class TracedRows:
    """The rows of a graph that is being traced, for heads: padded, with the states that its inputs select.

    ``states`` is [rows, tokens, hidden], or [rows, labels] of a backbone that gives logits of rows. ``mask`` is
    [rows, tokens], and ``weights`` has the same shape for each selection.
    """

    states: Tensor
    mask: Tensor
    weights: Mapping[str, Tensor]

    def selected(self, name: str) -> Tensor:
        """Return the first state of each row, or its states combined by the weights of a selection: [rows, hidden]."""
        if name == "first":
            return self.states if self.states.dim() == 2 else self.states[:, 0]
        weights = self.weights[name].unsqueeze(-1)
        if name == "max":
            return self.states.masked_fill(weights == 0, torch.finfo(torch.float32).min).amax(dim=1)
        return (self.states * weights).sum(dim=1)


class Traced(nn.Module):
    """A model whose forward pass returns all outputs that its heads read, in the order of ``compute``."""

    def __init__(self, loaded: LoadedModel) -> None:
        super().__init__()
        self.backbone = loaded.backbone
        self.model = loaded.backbone.model
        self.heads: dict[str, heads.AnyHead] = {}
        self.compute: dict[str, Callable[[TracedRows], Tensor]] = {}
        self.after_pooling: nn.Module | None = None
        self.poolings = 1
        self.table: Tensor | None = None
        for params, head in loaded.heads.items():
            self.heads[params.__name__] = self._add(head)

    def _add(self, head: Any) -> heads.AnyHead:
        match head:
            case EmbeddingHead(pooler=pooler):
                return heads.Vector(self._output("vectors", self._pooled(pooler)), normalizes=pooler.normalizes)
            case ChunkEmbeddingHead(pooler=pooler):
                if len(pooler.modules_after):
                    self.after_pooling, self.poolings = nn.Sequential(*pooler.modules_after), len(pooler.pooling)
                output = self._output("states", lambda rows: rows.states)
                return heads.Chunks(output, pooling=pooler.pooling, normalizes=pooler.normalizes)
            case TokenEmbeddingHead():
                return heads.TokenVectors(self._token_vectors(head), normalizes=head.normalizes)
            case MaxSimHead(tokens=tokens):
                output = self._token_vectors(tokens)
                return heads.LateInteraction(output, normalizes=tokens.normalizes, mean_scores=head.mean_scores)
            case SpladeHead():
                return heads.VocabularyWeights(
                    self._output("weights", lambda rows: head.padded(rows.states, rows.mask)),
                    max_active_dims=head.max_active_dims,
                )
            case LatentHead(pooler=pooler, max_active_dims=k):
                return heads.VocabularyWeights(self._output("weights", self._pooled(pooler)), max_active_dims=k)
            case LexicalHead(linear=linear):
                self.add_module("lexical", linear)
                output = self._output("token_weights", lambda rows: linear(rows.states).squeeze(-1).relu())
                return heads.TokenWeights(output, unused=tuple(sorted(head.unused)))
            case SparseLookupHead(weights=weights):
                self.table = weights
                return heads.TableWeights(max_active_dims=head.max_active_dims)
            case ClassificationHead(state=state, logits=of_row, functions=functions):
                return heads.Labels(self._activated("labels", lambda rows: of_row(rows.selected(state)), functions))
            case PooledClassificationHead(pooler=pooler, functions=functions):
                return heads.Labels(self._activated("labels", self._pooled(pooler), functions))
            case TokenClassificationHead(logits=of_tokens, functions=functions):
                name = self._activated("token_labels", lambda rows: of_tokens(rows.states), functions)
                return heads.TokenLabels(name, step_token_id=head.step_token_id)
        raise TypeError(f"there is no conversion of {type(head).__name__}")

    def _pooled(self, pooler: Pooler) -> Callable[[TracedRows], Tensor]:
        self.add_module("pooler", pooler)

        def pooled(rows: TracedRows) -> Tensor:
            parts = [rows.selected(name) for name in pooler.pooling or ("first",)]
            return pooler.after(torch.cat(parts, dim=-1))

        return pooled

    def _token_vectors(self, head: TokenEmbeddingHead) -> str:
        if isinstance(head.project, nn.Identity):
            return self._output("states", lambda rows: rows.states)
        self.add_module("project", head.project)
        return self._output("token_vectors", lambda rows: head.project(rows.states))

    def _activated(self, name: str, logits: Callable[[TracedRows], Tensor], functions: ActivationFunctions) -> str:
        for activation, function in functions.items():
            self._output(f"{name}_{activation}", partial(lambda apply, rows: apply(logits(rows)), function))
        return name

    def _output(self, name: str, compute: Callable[[TracedRows], Tensor]) -> str:
        self.compute[name] = compute
        return name

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor, *weights: Tensor
    ) -> tuple[Tensor, ...]:
        """Return the outputs for ids [rows, tokens]; ``weights`` are of all ``SELECTIONS``."""
        states = self.backbone.forward_ids(input_ids, attention_mask, token_type_ids)
        return self.of_states(states, attention_mask, *weights)

    def of_states(self, states: Tensor, mask: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        """Return the outputs for the backbone's output: its states or its logits."""
        rows = TracedRows(states.float(), mask, dict(zip(SELECTIONS, weights, strict=True)))
        return tuple(compute(rows).float() for compute in self.compute.values())


def convert(traced: Traced) -> ov.Model:
    """Return a model in float32 as one graph, with any number of rows and tokens; its outputs have names.

    The graph may use the memory of the model's weights. Blocks for seconds. Raises the converter's errors, of any
    class.
    """
    ids, selections = _example()
    with traceable_masks(traced.model):
        return _converted(traced, ids | selections, traced.compute)


def modules_in(graph: ov.Model, backbone: Backbone) -> dict[str, int]:
    """Return how many nodes of a converted graph compute each module: ``ConvertedModel.modules``."""
    ids, _ = _example()
    calls: Counter[str] = Counter()
    kinds = nn.Linear, nn.Embedding
    modules = {name: each for name, each in backbone.model.named_modules() if isinstance(each, kinds)}
    with torch.no_grad(), ExitStack() as hooks:
        for name, module in modules.items():
            hooks.callback(module.register_forward_hook(lambda *_, name=name: calls.update([name])).remove)
        backbone.forward_ids(*ids.values())
    weights = {name: module.weight.numpy(force=True) for name, module in modules.items()}
    # transformers computes a pooler's output from the states, beside them.
    return count_nodes(graph, weights, calls, ["pooler."] if backbone.output == "last_hidden_state" else [])


class _Heads(nn.Module):
    """The heads of a model, which read states that another graph computes."""

    def __init__(self, traced: Traced) -> None:
        super().__init__()
        self.traced = traced

    def forward(self, states: Tensor, mask: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        return self.traced.of_states(states, mask, *weights)


def convert_heads(traced: Traced) -> ov.Model:
    """Return the heads as a graph of ``states``, ``attention_mask`` and the selections. Raises as ``convert``."""
    ids, selections = _example()
    with torch.no_grad():
        states = traced.backbone.forward_ids(*ids.values()).float()
    inputs = {"states": states, "attention_mask": ids["attention_mask"]} | selections
    return _converted(_Heads(traced), inputs, traced.compute)


def convert_modules(modules: nn.Module, width: int) -> ov.Model:
    """Return the modules after pooling as a graph: ``pooled`` [vectors, ``width``] to ``vectors`` [vectors, d].

    Raises as ``convert``.
    """
    return _converted(modules, {"pooled": torch.ones(TRACED_ROWS, width, dtype=torch.float32)}, ["vectors"])


def _example() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return inputs by name: the ids, and the weights of selections."""
    ids = torch.arange(3, 3 + TRACED_ROWS * TRACED_TOKENS).view(TRACED_ROWS, TRACED_TOKENS)
    mask = torch.ones_like(ids)
    mask[-1, TRACED_TOKENS // 2 :] = 0
    return dict(zip(IDS, (ids, mask, torch.zeros_like(ids)), strict=True)), dict.fromkeys(SELECTIONS, mask.float())


def _converted(module: nn.Module, inputs: Mapping[str, Tensor], outputs: Iterable[str]) -> ov.Model:
    """Return a module as a graph with the inputs that it reads, and names for its outputs."""
    types = {torch.int64: ov.Type.i64, torch.float32: ov.Type.f32}
    example = tuple(inputs.values())
    shapes = [[-1, -1 if t.shape[1] == TRACED_TOKENS else t.shape[1], *t.shape[2:]] for t in example]
    given = [(ov.PartialShape(shape), types[t.dtype]) for shape, t in zip(shapes, example, strict=True)]
    with quiet(), torch.no_grad():
        model: ov.Model = ov.convert_model(module.eval(), example_input=example, input=given)
    for name, node in zip(inputs, model.get_parameters(), strict=True):
        node.output(0).get_tensor().set_names({name})
        node.set_friendly_name(name)
        if not node.output(0).get_target_inputs():
            model.remove_parameter(node)
    for name, output in zip(outputs, model.outputs, strict=True):
        output.get_tensor().set_names({name})
    return model


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress warnings and messages of the libraries that convert.

    The tracer warns about sizes that it takes for constants: the comparison of outputs shows whether they matter. It
    also reads every property of the model, of which ``loss_function`` warns.
    """
    loggers: list[Any] = [logging.getLogger(name) for name in ("nncf", "openvino", "transformers")]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


@frozen(eq=False)
class _Samples:
    """The inputs of rows, each a batch by itself. Each iteration reports its steps."""

    prompts: Sequence[RenderedPrompt]
    names: Sequence[str]
    pad_token_id: int

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for prompt in report_items(self.prompts, "quantising to int8"):
            yield Rows([PoolingRequest(prompt)], self.pad_token_id).arrays(self.names)

    def __len__(self) -> int:
        return len(self.prompts)


def quantize(
    model: ov.Model, prompts: Sequence[RenderedPrompt], *, pad_token_id: int, halves_range: bool = False
) -> ov.Model:
    """Return the model with its backbone's weights and activations in int8, in the ranges that they have for prompts.

    The heads stay as they are: they are small. With ``halves_range`` no sum of two products overflows at 16 bits, as
    weights take half of the range. Blocks: 13 s for MiniLM and 50 prompts, minutes for larger models. Raises NNCF's
    errors, of any class.
    """
    import nncf  # takes 3 s, and is needed only for this

    names = [model_input.get_any_name() for model_input in model.inputs]
    with quiet(), redirect_stdout(io.StringIO()):  # NNCF's own progress bars
        quantized: ov.Model = nncf.quantize(
            model,
            nncf.Dataset(_Samples(prompts, names, pad_token_id)),
            ignored_scope=nncf.IgnoredScope(names=_outside_the_backbone(model), validate=False),
            model_type=nncf.ModelType.TRANSFORMER,  # smooths activations, and keeps operations that must be exact
            subset_size=len(prompts),
            advanced_parameters=nncf.AdvancedQuantizationParameters(
                overflow_fix=nncf.OverflowFix.ENABLE if halves_range else nncf.OverflowFix.FIRST_LAYER
            ),
        )
    return quantized


def _outside_the_backbone(model: ov.Model) -> list[str]:
    """Return the names of the heads' matrix products."""
    products = [node.get_friendly_name() for node in model.get_ordered_ops() if node.get_type_name() == "MatMul"]
    return [name for name in products if not name.startswith("__module.model")]
