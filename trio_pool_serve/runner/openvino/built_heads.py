"""The usual heads as graphs that are built without torch: pooling, and the activations of logits."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import openvino as ov
from attrs import frozen
from openvino import opset15 as ops

from trio_pool_serve.runner.openvino.exported_graph import UnusableGraphError
from trio_pool_serve.runner.openvino.heads import POOLINGS, AnyHead, Chunks, Labels, TokenLabels, TokenVectors, Vector

LOWEST = np.finfo(np.float32).min

ACTIVATIONS: Mapping[str, Callable[[ov.Node], ov.Node]] = {
    "Identity": lambda logits: logits,
    "Sigmoid": ops.sigmoid,
    "Softmax": lambda logits: ops.softmax(logits, -1),
}
"""By their names in torch.nn."""


@frozen(kw_only=True)
class BuiltHeads:
    """Heads for what the backbone's ``output`` holds, sizes in ``rank`` dimensions; ``about`` is for the log.

    ``build`` makes their graph, whose input ``states`` has the given shape.
    """

    output: str
    rank: int
    heads: Mapping[str, AnyHead]
    about: str
    build: Callable[[ov.PartialShape], ov.Model]

    def graph(self, states: ov.PartialShape) -> ov.Model:
        """Return them as a graph of ``states`` and selections. Raises ``UnusableGraphError``."""
        if states.rank.is_dynamic or states.rank.get_length() != self.rank:
            raise UnusableGraphError(f"its output {self.output} has the shape {states}")
        return self.build(states)


def pooling_heads(pooling: Sequence[str], *, normalizes: bool) -> BuiltHeads:
    """Return the heads of an embedding model. Raises ``UnusableGraphError`` for unknown pooling types."""
    if not {*pooling} <= POOLINGS.keys():
        raise UnusableGraphError(f"there is no {'+'.join(pooling)} pooling")

    def build(shape: ov.PartialShape) -> ov.Model:
        states = _input("states", shape)
        weights = [_input(name, ov.PartialShape([-1, -1])) for name in pooling]
        pooled = [_pooled(states, of_states, name) for of_states, name in zip(weights, pooling, strict=True)]
        return _graph([states, *weights], {"vectors": ops.concat(pooled, 1), "states": states})

    heads: Mapping[str, AnyHead] = {
        "Embed": Vector("vectors", normalizes=normalizes),
        "EmbedChunks": Chunks("states", pooling=tuple(pooling), normalizes=normalizes),
        "TokenEmbed": TokenVectors("states", normalizes=False),
    }
    return BuiltHeads(
        output="last_hidden_state", rank=3, heads=heads, about=f"{'+'.join(pooling)} pooling", build=build
    )


def label_heads(labels: int, functions: Mapping[str, str], *, of_tokens: bool) -> BuiltHeads:
    """Return the head of a classifier; ``functions`` has one of ``ACTIVATIONS`` for each activation of requests.

    Raises ``UnusableGraphError`` for other names.
    """
    if unknown := {*functions.values()} - ACTIVATIONS.keys():
        raise UnusableGraphError(f"without torch there is no {', '.join(unknown)}")
    name = "token_labels" if of_tokens else "labels"

    def build(shape: ov.PartialShape) -> ov.Model:
        if shape[shape.rank.get_length() - 1] != labels:
            raise UnusableGraphError(f"its logits have the shape {shape}, and config.json names {labels} labels")
        logits = _input("states", shape)
        return _graph([logits], {f"{name}_{key}": ACTIVATIONS[function](logits) for key, function in functions.items()})

    heads: Mapping[str, AnyHead] = {"TokenClassify": TokenLabels(name)} if of_tokens else {"Classify": Labels(name)}
    about = f"{labels} label{'s' if labels > 1 else ''} for each {'token' if of_tokens else 'input'}"
    return BuiltHeads(output="logits", rank=3 if of_tokens else 2, heads=heads, about=about, build=build)


def _pooled(states: ov.Node, weights: ov.Node, name: str) -> ov.Node:
    weights = ops.unsqueeze(weights, 2)
    if name == "max":
        return ops.reduce_max(ops.select(ops.equal(weights, np.float32(0)), LOWEST, states), [1])
    return ops.reduce_sum(ops.multiply(states, weights), [1])


def _input(name: str, shape: ov.PartialShape) -> ov.Node:
    return ops.parameter(shape, np.float32, name=name)


def _graph(inputs: Sequence[ov.Node], outputs: Mapping[str, ov.Node]) -> ov.Model:
    model = ov.Model([ops.result(node) for node in outputs.values()], list(inputs))
    for name, output in zip(outputs, model.outputs, strict=True):
        output.get_tensor().set_names({name})
    return model
