"""LoRA adapters that are added to a model's weights batch by batch.

Hooks on the model's modules add the low-rank updates of the adapter that the calling thread computes with: y = W x +
scale · up (down x), Hu et al., https://arxiv.org/abs/2106.09685. Nothing is merged, so a model with many adapters takes
the memory of its weights once, and rows without an adapter are computed as before. A model that never had one has no
hooks.
"""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from attrs import Factory, astuple, define, field, frozen
from torch import Tensor, nn
from torch.nn.functional import embedding, linear
from transformers.pytorch_utils import Conv1D

from trio_pool_serve.errors import ModelLoadError, require
from trio_pool_serve.runner.adapter_store import (
    AdapterStore,
    AdapterWeights,
    Array,
    Update,
    require_all_layers,
    require_shape,
)
from trio_pool_serve.runner.loaded_model import LoadedModel
from trio_pool_serve.types import Adapter

LAYERS = nn.Linear | nn.Embedding | Conv1D
"""Classes of modules that adapters update."""


@frozen(eq=False)
class LowRankChange:
    """The change of a linear layer: ``down`` [r, in], and ``up`` [out, r], which includes the scale."""

    down: Tensor
    up: Tensor

    def __call__(self, inputs: Tensor, output: Tensor) -> Tensor:
        """Return the output with the adapter."""
        return output + linear(linear(inputs, self.down), self.up)


@frozen(eq=False)
class EmbeddingChange:
    """The change of an embedding: ``rows`` [ids, r], and ``up`` [dim, r], which includes the scale."""

    rows: Tensor
    up: Tensor

    def __call__(self, inputs: Tensor, output: Tensor) -> Tensor:
        """Return the output with the adapter."""
        return output + linear(embedding(inputs, self.rows), self.up)


@frozen(eq=False)
class ReplacedLayer:
    """The new weights of a linear layer that was trained as a whole, such as a classifier."""

    weight: Tensor
    bias: Tensor | None

    def __call__(self, inputs: Tensor, _: Tensor) -> Tensor:
        """Return the output with the adapter."""
        return linear(inputs, self.weight, self.bias)


Change: TypeAlias = LowRankChange | EmbeddingChange | ReplacedLayer
"""Maps a module's input and output to its output with an adapter."""


@frozen(eq=False)
class LoadedAdapter:
    """The changes of an adapter, on the model's device."""

    changes: Mapping[nn.Module, Change]
    nbytes: int


@define(eq=False)
class Adapters:
    """The adapters of one model, by the digest of their files; used by several threads.

    ``read`` returns an adapter's weights, or raises ``ModelLoadError``.
    """

    modules: Mapping[str, nn.Module]
    """The model's modules by name."""
    prefix: str
    """transformers' ``base_model_prefix``: names of modules in the model with and without a head differ by it."""
    read: Callable[[Path], AdapterWeights]
    store: AdapterStore[LoadedAdapter] = field(
        init=False, default=Factory(lambda self: AdapterStore(self.read, self._place), takes_self=True)
    )
    _hooked: set[nn.Module] = field(init=False, factory=set)
    _applied: threading.local = field(init=False, factory=threading.local)

    @classmethod
    def of(cls, loaded: LoadedModel, read: Callable[[Path], AdapterWeights]) -> "Adapters":
        """Return the adapters of a model."""
        model = loaded.backbone.model
        named = dict(model.named_modules() if loaded.modules is None else loaded.modules)
        inside = tuple(f"{name}." for name, each in named.items() if isinstance(each, nn.MultiheadAttention))
        # Attention of torch's own class reads the weights of its layers and calls none of them.
        computed = {name: each for name, each in named.items() if not name.startswith(inside)}
        return cls(computed, getattr(model, "base_model_prefix", ""), read)

    @contextmanager
    def applied(self, adapter: Adapter | None) -> Iterator[None]:
        """Within the block, the calling thread computes with an adapter, read from its files if necessary.

        Raises ``AdapterError``.
        """
        self._applied.changes = None if adapter is None else self.store.get(adapter).changes
        try:
            yield
        finally:
            self._applied.changes = None

    def _place(self, weights: AdapterWeights, folder: str) -> LoadedAdapter:
        modules = _Modules(self.modules, f"{self.prefix}.", folder)
        found = [(modules[name], modules.change(name, update)) for name, update in weights.updates.items()]
        found += modules.replaced(weights.weights).items()
        changed = {modules[name] for name in (*weights.updates, *(name.rpartition(".")[0] for name in weights.weights))}
        unchanged = [name for name, each in self.modules.items() if isinstance(each, LAYERS) and each not in changed]
        require_all_layers(weights, unchanged, folder)
        changes = dict(found)
        require(
            len(changes) == len(found),
            f"{folder} changes a module twice. Serve it as a model: then it is merged into its base.",
        )
        for module in changes.keys() - self._hooked:
            module.register_forward_hook(self._change, with_kwargs=True)
            self._hooked.add(module)
        tensors = [each for change in changes.values() for each in astuple(change, recurse=False)]
        return LoadedAdapter(changes, sum(tensor.nbytes for tensor in tensors if tensor is not None))

    def _change(self, module: nn.Module, args: tuple[Any, ...], *rest: Any) -> Any:
        """Return the output with the adapter. ``rest`` is the keyword arguments and the output.

        Another thread computes a row without an adapter while a hook is registered: then keywords may be missing.
        """
        changes: Mapping[nn.Module, Change] | None = getattr(self._applied, "changes", None)
        if changes is None or (change := changes.get(module)) is None:
            return None
        kwargs, output = rest
        return change(args[0] if args else next(iter(kwargs.values())), output)


@frozen(eq=False)
class _Modules:
    """The modules of a model by the names that an adapter may have for them. Errors are ``ModelLoadError``s."""

    by_name: Mapping[str, nn.Module]
    prefix: str
    folder: str
    """The folder of the adapter, for errors."""

    def __getitem__(self, name: str) -> nn.Module:
        """Return a module by its name, in this model or in one with another head that the adapter was trained on."""
        for each in (name, name.removeprefix(self.prefix), self.prefix + name):
            if (module := self.by_name.get(each)) is not None:
                return module
        raise ModelLoadError(f"{self.folder} changes {name}, a module that the model does not have or compute.")

    def change(self, name: str, update: Update) -> Change:
        """Return the change of a module."""
        module: Any = self[name]
        is_embedding = isinstance(module, nn.Embedding)
        require(
            is_embedding == update.is_embedding and isinstance(module, LAYERS),
            f"{self.folder} changes {name}, which is of the class {type(module).__name__} here.",
        )
        shape = tuple(module.weight.shape) if isinstance(module, nn.Linear) else tuple(module.weight.shape)[::-1]
        require_shape(update, shape, name, self.folder)
        scale = update.scale * (float(getattr(module, "embed_scale", 1.0)) if is_embedding else 1.0)
        up = self._placed(update.up * np.float32(scale), module.weight)
        down = self._placed(update.down, module.weight)
        return EmbeddingChange(down.T.contiguous(), up) if is_embedding else LowRankChange(down, up)

    def replaced(self, weights: Mapping[str, Array]) -> dict[nn.Module, Change]:
        """Return the changes of linear layers that an adapter replaces. Other weights must be the model's own."""
        by_module: dict[str, dict[str, Array]] = {}
        for name, weight in weights.items():
            module_name, _, of_module = name.rpartition(".")
            by_module.setdefault(module_name, {})[of_module] = weight
        changes: dict[nn.Module, Change] = {}
        for name, own in by_module.items():
            module = self[name]
            theirs = dict(module.named_parameters(recurse=False))
            require(
                {key: each.shape for key, each in own.items()} == {key: tuple(theirs[key].shape) for key in theirs},
                f"{self.folder} replaces {name} by weights of other names or shapes.",
            )
            placed = {key: self._placed(each, theirs[key]) for key, each in own.items()}
            if all(torch.equal(placed[key], theirs[key]) for key in theirs):
                continue  # PEFT stores embeddings beside their updates
            require(
                type(module) is nn.Linear,
                f"{self.folder} replaces all of {name}; per request, only linear layers can be replaced. "
                "Serve it as a model: its weights are merged when it is loaded.",
            )
            changes[module] = ReplacedLayer(placed["weight"], placed.get("bias"))
        return changes

    @staticmethod
    def _placed(array: Array, weight: Tensor) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(weight.device, weight.dtype)
