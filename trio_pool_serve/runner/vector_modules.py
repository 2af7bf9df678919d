"""The modules after a table of static embeddings, by NumPy: functions from vectors to vectors."""

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from attrs import frozen

from trio_pool_serve.runner.openvino.heads import Floats, finished
from trio_pool_serve.types import Embed

VectorModule: TypeAlias = Callable[[Floats], Floats]
"""Maps the vectors of texts, [rows, d], to other vectors, [rows, d']."""

ACTIVATIONS: Mapping[str, VectorModule] = {
    "torch.nn.modules.activation.Tanh": np.tanh,
    "torch.nn.modules.activation.ReLU": lambda vectors: np.maximum(vectors, 0),
    "torch.nn.modules.activation.Sigmoid": lambda vectors: np.float32(0.5) * (1 + np.tanh(vectors / 2)),
    "torch.nn.modules.linear.Identity": lambda vectors: vectors,
}
"""By the names in a Dense module's config."""


@frozen(eq=False)
class Dense:
    """A linear layer with an activation; ``adds_input`` adds its input, mapped by ``residual`` if the widths differ."""

    weight: Floats
    bias: Floats | None
    activation: VectorModule
    adds_input: bool
    residual: Floats | None

    def __call__(self, vectors: Floats) -> Floats:
        """Map [rows, d] to [rows, d']."""
        out = self.activation(vectors @ self.weight.T + (0 if self.bias is None else self.bias))
        if not self.adds_input:
            return out
        return out + (vectors if self.residual is None else vectors @ self.residual.T)


@frozen(eq=False)
class LayerNorm:
    """Layer normalisation over a vector, with torch's usual epsilon."""

    weight: Floats
    bias: Floats

    def __call__(self, vectors: Floats) -> Floats:
        """Map [rows, d] to [rows, d]."""
        centred = vectors - vectors.mean(axis=-1, keepdims=True)
        scale = np.sqrt((centred**2).mean(axis=-1, keepdims=True) + np.float32(1e-5))
        return np.asarray(centred / scale * self.weight + self.bias, np.float32)


def normalized(vectors: Floats) -> Floats:
    """Return vectors of unit length; zeros stay zeros."""
    return finished(vectors, Embed(), normalizes=True)


WITH_WEIGHTS = ("Dense", "LayerNorm")


def vector_module(
    name: str, config: Mapping[str, Any], stored: Mapping[str, npt.NDArray[Any]], width: int
) -> tuple[VectorModule, int]:
    """Return a module of sentence-transformers by its class, and the width of vectors after it.

    ``stored`` are the tensors of its file, ``width`` is that of vectors before it. Raises ``ValueError`` for an
    activation or tensors that it cannot have.
    """
    tensors = {name: tensor.astype(np.float32) for name, tensor in stored.items()}
    if name == "Normalize":
        return normalized, width
    if name == "Truncate":
        width = min(width, config["dimensions"])
        return lambda vectors: vectors[:, :width], width
    if name == "LayerNorm":
        _require(tensors, dict.fromkeys(("norm.weight", "norm.bias"), (width,)))
        return LayerNorm(tensors["norm.weight"], tensors["norm.bias"]), width
    activation = config.get("activation_function", "torch.nn.modules.activation.Tanh")
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation_function is {activation!r}; accepted: {', '.join(ACTIVATIONS)}")
    out, adds_input = config.get("out_features"), bool(config.get("use_residual"))
    wanted: dict[str, tuple[Any, ...]] = {"linear.weight": (out, width)}
    wanted |= {"linear.bias": (out,)} if config.get("bias", True) else {}
    wanted |= {"residual.weight": (out, width)} if adds_input and out != width else {}
    _require(tensors, wanted)
    weight, bias, residual = tensors["linear.weight"], tensors.get("linear.bias"), tensors.get("residual.weight")
    return Dense(weight, bias, ACTIVATIONS[activation], adds_input=adds_input, residual=residual), len(weight)


def _require(tensors: Mapping[str, Floats], wanted: Mapping[str, tuple[Any, ...]]) -> None:
    if (shapes := {name: tensor.shape for name, tensor in tensors.items()}) != wanted:
        raise ValueError(f"model.safetensors has the shapes {shapes}; config.json requires {wanted}")
