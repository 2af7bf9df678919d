"""A backbone that another tool has exported, and the usual heads, joined to one graph. It needs no torch."""

from collections.abc import Callable, Mapping, Sequence
from math import prod
from pathlib import Path

import numpy as np
import openvino as ov
from attrs import frozen
from openvino import opset15 as ops

from trio_pool_serve.errors import require
from trio_pool_serve.runner.batch_rows import IDS
from trio_pool_serve.runner.openvino.converted_model import UnusableGraphError
from trio_pool_serve.runner.openvino.heads import POOLINGS, AnyHead, Chunks, Labels, TokenLabels, TokenVectors, Vector
from trio_pool_serve.runner.openvino.programs import read_graph

OUTPUTS: Mapping[str, frozenset[str]] = {
    "last_hidden_state": frozenset({"last_hidden_state", "token_embeddings"}),
    "logits": frozenset({"logits"}),
}
"""Names of a file's output by the output that heads read. sentence-transformers calls states token_embeddings."""


@frozen(eq=False)
class ExportedGraph:
    """A graph from ids to ``states``, the input of heads: [rows, tokens, …], or [rows, labels]."""

    graph: ov.Model
    states: "ov.Output"

    @classmethod
    def read(cls, file: Path, output: str) -> "ExportedGraph":
        """Read a file. Raises ``UnusableGraphError``, or OpenVINO's ``RuntimeError``."""
        graph = read_graph(file, ENABLE_MMAP=False)  # it may be overwritten meanwhile
        for given in graph.inputs:
            node = given.get_node()
            node.set_friendly_name(next(iter(given.names & {*IDS}), node.get_friendly_name()))
        inputs = {given.get_node().get_friendly_name(): given for given in graph.inputs}
        require(
            {"input_ids", "attention_mask"} <= inputs.keys() <= {*IDS},
            f"its inputs are {', '.join(inputs)}",
            UnusableGraphError,
        )
        require(
            all(given.element_type == ov.Type.i64 for given in graph.inputs),
            "its inputs are not int64",
            UnusableGraphError,
        )
        graph.reshape({given: ov.PartialShape([-1, -1]) for given in graph.inputs})
        found = [result for result in graph.get_results() if result.output(0).names & OUTPUTS[output]]
        require(bool(found), f"it has no output {' or '.join(sorted(OUTPUTS[output]))}", UnusableGraphError)
        states = found[0].input_value(0)
        return cls(graph, states if states.element_type == ov.Type.f32 else ops.convert(states, "f32").output(0))

    def joined(self, heads: ov.Model) -> ov.Model:
        """Return one graph with the outputs of ``heads``, whose inputs are states, the mask and weights of states.

        Both graphs are used up. Raises ``UnusableGraphError`` if the heads are for states of another shape.
        """
        inputs = {node.get_friendly_name(): node for node in self.graph.get_parameters()}
        sources = {"states": self.states, "attention_mask": inputs["attention_mask"].output(0)}
        for node in heads.get_parameters():
            source = sources.get(node.get_friendly_name())
            if source is None:
                inputs[node.get_friendly_name()] = node
                continue
            shape, expected = source.partial_shape, node.output(0).partial_shape
            last = len(expected) - 1
            if (
                shape.rank.is_dynamic
                or not shape.compatible(expected)
                or (shape[last].is_dynamic and expected[last].is_static)
            ):
                raise UnusableGraphError(f"its output has the shape {shape}, where {expected} is expected")
            for target in node.output(0).get_target_inputs():
                target.replace_source_output(source)
        for name, node in inputs.items():
            node.output(0).get_tensor().set_names({name})
        return ov.Model(heads.get_results(), [*inputs.values()])

    def parameters(self) -> tuple[int, int]:
        """Return how many parameters there are, and how many bytes they take."""
        weights = [node for node in self.graph.get_ops() if _is_weight(node)]
        size_bytes = sum(prod(node.shape) * node.get_element_type().bitwidth // 8 for node in weights)
        return sum(prod(node.shape) for node in weights), size_bytes


def _is_weight(node: ov.Node) -> bool:
    """Whether a node is a parameter: not a number, and not a shape or an index."""
    kind = node.get_element_type() if node.get_type_name() == "Constant" else ov.Type.boolean
    return bool(kind != ov.Type.boolean and (kind.is_real() or kind.bitwidth <= 8) and prod(node.shape) > 1)


LOWEST = np.finfo(np.float32).min

ACTIVATIONS: Mapping[str, Callable[[ov.Node], ov.Node]] = {
    "Identity": lambda logits: logits,
    "Sigmoid": ops.sigmoid,
    "Softmax": lambda logits: ops.softmax(logits, -1),
}
"""By their names in torch.nn."""


@frozen(kw_only=True, eq=False)
class BuiltHeads:
    """Heads for the backbone's ``output``, as a graph of these ``states`` and selections; ``about`` is for the log."""

    output: str
    heads: Mapping[str, AnyHead]
    about: str
    graph: ov.Model


def pooling_heads(pooling: Sequence[str], *, normalizes: bool) -> BuiltHeads:
    """Return the heads of an embedding model. Raises ``UnusableGraphError`` for unknown pooling types."""
    require({*pooling} <= POOLINGS.keys(), f"{'+'.join(pooling)} pooling is not supported", UnusableGraphError)
    states = ops.parameter([-1, -1, -1], np.float32, name="states")
    weights = [ops.parameter([-1, -1], np.float32, name=name) for name in pooling]
    pooled = [_pooled(states, of_states, name) for of_states, name in zip(weights, pooling, strict=True)]
    return BuiltHeads(
        output="last_hidden_state",
        heads={
            "Embed": Vector("vectors", normalizes=normalizes),
            "EmbedChunks": Chunks("states", pooling=tuple(pooling), normalizes=normalizes),
            "TokenEmbed": TokenVectors("states", normalizes=False),
        },
        about=f"{'+'.join(pooling)} pooling",
        graph=_graph([states, *weights], {"vectors": ops.concat(pooled, 1), "states": states}),
    )


def label_heads(labels: int, functions: Mapping[str, str], *, of_tokens: bool) -> BuiltHeads:
    """Return the head of a classifier; ``functions`` has one of ``ACTIVATIONS`` for each activation of requests.

    Raises ``UnusableGraphError`` for other names.
    """
    if unknown := {*functions.values()} - ACTIVATIONS.keys():
        raise UnusableGraphError(f"{', '.join(unknown)} requires torch")
    name = "token_labels" if of_tokens else "labels"
    logits = ops.parameter([-1, -1, labels] if of_tokens else [-1, labels], np.float32, name="states")
    return BuiltHeads(
        output="logits",
        heads={"TokenClassify": TokenLabels(name)} if of_tokens else {"Classify": Labels(name)},
        about=f"{labels} label{'s' if labels > 1 else ''} for each {'token' if of_tokens else 'input'}",
        graph=_graph([logits], {f"{name}_{key}": ACTIVATIONS[function](logits) for key, function in functions.items()}),
    )


def _pooled(states: ov.Node, weights: ov.Node, name: str) -> ov.Node:
    weights = ops.unsqueeze(weights, 2)
    if name == "max":
        return ops.reduce_max(ops.select(ops.equal(weights, np.float32(0)), LOWEST, states), [1])
    return ops.reduce_sum(ops.multiply(states, weights), [1])


def _graph(inputs: Sequence[ov.Node], outputs: Mapping[str, ov.Node]) -> ov.Model:
    model = ov.Model([ops.result(node) for node in outputs.values()], list(inputs))
    for name, output in zip(outputs, model.outputs, strict=True):
        output.get_tensor().set_names({name})
    return model
