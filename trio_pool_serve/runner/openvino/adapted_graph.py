"""A converted graph with low-rank updates of its weights as inputs: one compiled graph for many adapters.

An adapter merged into the weights of a graph of its own would take the memory of the model again. A linear layer
becomes y = W x + up (down x), Hu et al., https://arxiv.org/abs/2106.09685; ranks may differ from adapter to adapter.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from math import prod

import numpy as np
import openvino as ov
from openvino import opset15 as ops

NODE = re.compile(r"__module\.model\.(?P<module>.+)/aten::(linear/MatMul|embedding/Gather)(_\d+)?")
"""The names that the converter gives to a linear layer's product and an embedding's lookup, in a backbone of torch."""

IN_BETWEEN = ("FakeQuantize", "nncf_smooth_quant")
"""Of int8 graphs, nodes between a layer's input and its product, by their types and in their names."""


def nodes_by_module(graph: ov.Model) -> dict[str, list[ov.Node]]:
    """Return the products and lookups of a backbone's modules, by the modules' names."""
    found: dict[str, list[ov.Node]] = {}
    for node in graph.get_ordered_ops():
        if match := NODE.fullmatch(node.get_friendly_name()):
            found.setdefault(match["module"], []).append(node)
    return found


def is_embedding(node: ov.Node) -> bool:
    """Return whether a node of a module is an embedding's."""
    return bool(node.get_type_name() == "Gather")


def weight_of(node: ov.Node) -> "ov.Output":
    """Return the weight of a module's node: [out, in] of a linear layer, [ids, dim] of an embedding."""
    return node.input_value(0 if is_embedding(node) else 1)


def input_names(module: str) -> tuple[str, str]:
    """Return the names of the inputs for a module's factors."""
    return f"{module}.down", f"{module}.up"


def with_factors(model: ov.Model, modules: Iterable[str]) -> ov.Model:
    """Return a copy with inputs for the factors of modules: [in, r] or, of an embedding, [ids, r], and [r, out].

    ``out`` is ``dim`` of an embedding. The copy shares the weights.
    """
    graph = model.clone()
    nodes = nodes_by_module(graph)
    for module in sorted(modules):
        out, size = weight_of(nodes[module][0]).partial_shape
        if is_embedding(nodes[module][0]):
            out, size = size, out
        down, up = ops.parameter([size, -1], np.float32), ops.parameter([-1, out], np.float32)
        for name, parameter in zip(input_names(module), (down, up), strict=True):
            parameter.set_friendly_name(name)
            parameter.output(0).get_tensor().set_names({name})
        graph.add_parameters([down, up])
        for node in nodes[module]:
            targets = node.output(0).get_target_inputs()
            if is_embedding(node):
                reduced = ops.gather(down, node.input_value(1), np.int64(0))
            else:
                reduced = ops.matmul(_given(node.input_value(0)), down, transpose_a=False, transpose_b=False)
            update = ops.matmul(reduced, up, transpose_a=False, transpose_b=False)
            updated = ops.add(node.output(0), update)
            for target in targets:
                target.replace_source_output(updated.output(0))
    graph.validate_nodes_and_infer_types()
    return graph


def _given(value: "ov.Output") -> "ov.Output":
    """Return a layer's input as it is before it is scaled and rounded for int8."""
    while any(kind in f"{value.node.get_type_name()} {value.node.get_friendly_name()}" for kind in IN_BETWEEN):
        value = value.node.input_value(0)
    return value


def count_nodes(
    graph: ov.Model, weights: Mapping[str, np.ndarray], calls: Mapping[str, int], unused: Sequence[str]
) -> dict[str, int]:
    """Return how many nodes compute each module, as ``ConvertedModel.modules`` has it.

    ``weights`` are the modules' as torch has them, ``calls`` are how often torch calls them, and the output does not
    depend on modules whose names begin with one of ``unused``.
    """
    nodes = nodes_by_module(graph)

    def count(module: str, weight: np.ndarray) -> int:
        found = nodes.get(module, [])
        if not calls.get(module) or (not found and module.startswith(tuple(unused))):
            return 0
        is_whole = len(found) == calls[module] and all(_is_plain(node, weight) for node in found)
        return len(found) if is_whole else -1

    return {module: count(module, weight) for module, weight in weights.items()}


def _is_plain(node: ov.Node, weight: np.ndarray) -> bool:
    """Return whether a node has the weight as it is: neither scaled nor transposed."""
    held = weight_of(node).get_node()
    if held.get_type_name() != "Constant" or not np.array_equal(held.data, weight):
        return False
    attributes = node.get_attributes()
    return is_embedding(node) or (
        attributes["transpose_b"] and not attributes["transpose_a"] and prod(weight.shape) > 0
    )
