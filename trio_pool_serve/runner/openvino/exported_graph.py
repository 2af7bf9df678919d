"""A backbone that another tool has exported, joined with heads to one graph. It needs no torch."""

from collections.abc import Mapping
from math import prod
from pathlib import Path

import openvino as ov
from attrs import frozen
from openvino import opset15 as ops

from trio_pool_serve.runner.openvino.inputs import IDS
from trio_pool_serve.runner.openvino.programs import read_graph

OUTPUTS: Mapping[str, frozenset[str]] = {
    "last_hidden_state": frozenset({"last_hidden_state", "token_embeddings"}),
    "logits": frozenset({"logits"}),
}
"""Names of a file's output by the output that heads read. sentence-transformers calls states token_embeddings."""


class UnusableGraphError(Exception):
    """A graph cannot be made, or its output is not the model's; the message says why."""


@frozen(eq=False)
class ExportedGraph:
    """A graph from ids to ``states``, what heads read: [rows, tokens, …], or [rows, labels]."""

    graph: ov.Model
    states: "ov.Output"

    @classmethod
    def read(cls, file: Path, output: str) -> "ExportedGraph":
        """Read a file. Raises ``UnusableGraphError``, and what OpenVINO raises: ``RuntimeError``."""
        graph = read_graph(file)
        for given in graph.inputs:
            node = given.get_node()
            node.set_friendly_name(next(iter(given.names & {*IDS}), node.get_friendly_name()))
        inputs = {given.get_node().get_friendly_name(): given for given in graph.inputs}
        if not {"input_ids", "attention_mask"} <= inputs.keys() <= {*IDS}:
            raise UnusableGraphError(f"its inputs are {', '.join(inputs)}")
        if any(given.element_type != ov.Type.i64 for given in graph.inputs):
            raise UnusableGraphError("its inputs are not int64")
        graph.reshape({given: ov.PartialShape([-1, -1]) for given in graph.inputs})
        found = [result for result in graph.get_results() if result.output(0).names & OUTPUTS[output]]
        if not found:
            raise UnusableGraphError(f"it has no output {' or '.join(sorted(OUTPUTS[output]))}")
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
