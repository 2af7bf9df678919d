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


@frozen(kw_only=True, eq=False)
class BuiltHeads:
    """Heads for the backbone's ``output``, as a graph of these ``states`` and selections; ``about`` is for the log."""

    output: str
    heads: Mapping[str, AnyHead]
    about: str
    graph: ov.Model


def pooling_heads(pooling: Sequence[str], *, normalizes: bool) -> BuiltHeads:
    """Return the heads of an embedding model. Raises ``UnusableGraphError`` for unknown pooling types."""
    if not {*pooling} <= POOLINGS.keys():
        raise UnusableGraphError(f"there is no {'+'.join(pooling)} pooling")
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
        raise UnusableGraphError(f"without torch there is no {', '.join(unknown)}")
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
