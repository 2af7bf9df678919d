"""The LoRA adapters of a converted model: their factors, and the programs that compute with them."""

from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path

import numpy as np
import openvino as ov
from attrs import Factory, define, field, frozen

from trio_pool_serve.errors import AdapterError, require
from trio_pool_serve.runner.adapter_store import (
    AdapterStore,
    AdapterWeights,
    Array,
    RecentlyUsed,
    Update,
    require_all_layers,
    require_shape,
    shown,
)
from trio_pool_serve.runner.openvino.adapted_graph import (
    input_names,
    is_embedding,
    nodes_by_module,
    weight_of,
    with_factors,
)
from trio_pool_serve.runner.openvino.programs import Programs
from trio_pool_serve.types import Adapter

MAX_PROGRAMS = 4
"""Sets of modules with programs in memory, each of about the model's size; the least recently used leaves first."""


@frozen(eq=False)
class Factors:
    """The inputs of an adapter by name, ready to be set, and the modules that it updates."""

    modules: frozenset[str]
    arrays: Mapping[str, Array]
    """The arrays whose memory ``tensors`` uses."""
    tensors: dict[str, ov.Tensor]

    @property
    def nbytes(self) -> int:
        """Bytes of all inputs."""
        return sum(array.nbytes for array in self.arrays.values())


@define(eq=False, slots=False)
class GraphAdapters:
    """The adapters of one graph; used by several threads.

    ``modules`` is the field of ``ConvertedModel``, and ``read`` the one of ``AdapterStore``. The first batch of an
    adapter that updates other modules than earlier ones compiles programs, in half a second or more for a large model.
    """

    base: Programs
    modules: Mapping[str, int]
    read: Callable[[Path], AdapterWeights]
    store: AdapterStore[Factors] = field(
        init=False, default=Factory(lambda self: AdapterStore(self.read, self._place), takes_self=True)
    )
    _programs: RecentlyUsed[Programs] = field(
        init=False, factory=lambda: RecentlyUsed(lambda programs: len(programs) > MAX_PROGRAMS)
    )

    def of(self, adapter: Adapter) -> tuple[Programs, dict[str, ov.Tensor]]:
        """Return the programs for rows with an adapter, and further inputs. Raises ``AdapterError``."""
        factors = self.store.get(adapter)
        if not factors.modules:
            return self.base, {}

        def compiled() -> Programs:
            return Programs(self.base.graph, self.base.params, with_factors(self.base.model, factors.modules))

        return self._programs.get(factors.modules, compiled), factors.tensors

    def return_memory(self) -> None:
        """Return the memory that earlier passes left in the programs."""
        for programs in self._programs.values():
            programs.return_memory()

    @cached_property
    def _nodes(self) -> Mapping[str, list[ov.Node]]:
        return nodes_by_module(self.base.model)

    def _place(self, weights: AdapterWeights, folder: str) -> Factors:
        names = self._names([*weights.updates, *(name.rpartition(".")[0] for name in weights.weights)], folder)
        require_all_layers(weights, self.modules.keys() - names.values(), folder)
        for name, weight in weights.weights.items():
            module, _, leaf = name.rpartition(".")
            is_own = leaf == "weight" and self._has(names[module], weight)  # PEFT stores embeddings beside updates
            _require(is_own, folder, f"replaces the whole of {module}")
        arrays: dict[str, Array] = {}
        for name, update in weights.updates.items():
            if self.modules[names[name]]:  # else the output does not depend on it
                arrays |= self._inputs(names[name], update, folder)
        tensors = {name: ov.Tensor(array, shared_memory=True) for name, array in arrays.items()}
        modules = frozenset(name.removesuffix(".up") for name in arrays if name.endswith(".up"))
        return Factors(modules, arrays, tensors)

    def _names(self, given: list[str], folder: str) -> dict[str, str]:
        """Return the graph's names of modules.

        An adapter may have been trained on the model with or without a head: then all its names have a prefix more, or
        one less. Raises ``AdapterError`` with the names that the graph lacks.
        """
        prefixes = sorted({name.partition(".")[0] + "." for name in self.modules})
        ways: list[Callable[[str], str]] = [
            lambda name: name,
            lambda name: name.partition(".")[2],
            *((lambda name, prefix=prefix: prefix + name) for prefix in prefixes),
        ]
        way = max(ways, key=lambda way: sum(way(name) in self.modules for name in given))
        missing = sorted({name for name in given if self.modules.get(way(name), -1) < 0})
        _require(not missing, folder, f"changes {shown(missing)}")
        return {name: way(name) for name in given}

    def _has(self, module: str, weight: Array) -> bool:
        """Return whether the graph's weight of a module is this one."""
        held = [weight_of(node).get_node() for node in self._nodes.get(module, [])]
        return bool(held) and all(
            node.get_type_name() == "Constant" and np.array_equal(node.data, weight) for node in held
        )

    def _inputs(self, module: str, update: Update, folder: str) -> dict[str, Array]:
        """Return the inputs for an update. Raises ``AdapterError`` if the module has another shape."""
        nodes = self._nodes.get(module, [])
        is_whole = len(nodes) == self.modules[module] and is_embedding(nodes[0]) == update.is_embedding
        _require(is_whole, folder, f"changes {module}")
        shape = tuple(weight_of(nodes[0]).get_shape())[:: -1 if update.is_embedding else 1]
        require_shape(update, shape, module, folder)
        factors = update.down.T, update.up.T * np.float32(update.scale)
        return dict(zip(input_names(module), map(np.ascontiguousarray, factors), strict=True))


def _require(is_supported: bool, folder: str, what: str) -> None:  # noqa: FBT001  (as an assertion)
    require(
        is_supported,
        f"{folder} {what}, which OpenVINO's graph of the model does not have as linear layers or embeddings of the "
        "backbone. Start the server with --backend torch, or serve the adapter merged, as a model.",
        AdapterError,
    )
