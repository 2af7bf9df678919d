"""Merging a LoRA adapter into the weights of the model that it was trained on."""

import logging
from collections.abc import Callable, Collection
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, rename_source_key
from transformers.pytorch_utils import Conv1D

from trio_pool_serve.errors import require
from trio_pool_serve.models.files.adapter_files import AdapterFiles, LowRankUpdate
from trio_pool_serve.runner.adapter_store import shown

logger = logging.getLogger(__name__)

HEAD = "lm_head."
"""A head that models for other tasks lack. transformers ignores its weights in their checkpoints, too."""


@torch.no_grad()
def merge_adapter(model: Any, adapter: AdapterFiles, optional_weights: Collection[str] = ()) -> set[str]:
    """Merge an adapter, in float32; return the names of all weights that it replaces or updates.

    Modules whose names begin with one of ``optional_weights`` may lack updates. Weights that were tied to others are
    not tied any more: an adapter changes only the modules that it names, as in PEFT. Raises ``ModelLoadError`` if the
    adapter does not fit the model.
    """
    rename, parameters = renaming_to(model), dict(model.named_parameters(remove_duplicate=False))
    weights = {rename(name): torch.from_numpy(values) for name, values in adapter.weights.items()}
    updates = {rename(f"{module}.weight"): update for module, update in adapter.updates.items()}
    names = weights.keys() | updates.keys()
    unknown = [name for name in names - parameters.keys() if not name.startswith(HEAD)]
    _require_none(unknown, adapter, f"updates modules that {type(model).__name__} does not have")
    missing = _missing_updates(model, adapter, tuple(optional_weights)) - names
    _require_none(missing, adapter, f"lacks tensors for modules of {type(model).__name__} that its config names")
    for name in sorted(names & parameters.keys()):
        owner, _, leaf = name.rpartition(".")
        module, old = model.get_submodule(owner), parameters[name]
        new: Tensor = weights.get(name, old.data).float()
        delta = weight_delta(updates[name], module).to(old.device) if name in updates else torch.zeros_like(new)
        _require_shape(name, old, new, adapter)
        _require_shape(name, old, delta, adapter)
        setattr(module, leaf, nn.Parameter((new.to(old.device) + delta).to(old), requires_grad=False))
    logger.info("merged the LoRA adapter in %s: %d updates, %d weights", adapter.path, len(updates), len(weights))
    return names


def renaming_to(model: Any) -> Callable[[str], str]:
    """Return a function that maps names of weights to names in ``model``, as transformers does for checkpoints.

    Names in older versions of a model, and in its other classes, become its own; others are returned as they are.
    """
    known, transforms = model.state_dict(), get_model_conversion_mapping(model)
    converters = [transform for transform in transforms if isinstance(transform, WeightConverter)]
    renamings: list[Any] = [transform for transform in transforms if not isinstance(transform, WeightConverter)]

    def rename(name: str) -> str:
        if name in known:
            return name
        renamed, fused = rename_source_key(name, renamings, converters, model.base_model_prefix or None, known)
        return name if fused else renamed  # a part of a larger weight

    return rename


def weight_delta(update: LowRankUpdate, module: nn.Module) -> Tensor:
    """Return the change of the weight of ``module`` by an update, in float32 and as the module stores it.

    Raises ``ModelLoadError`` for modules of other classes than linear layers and embeddings.
    """
    classes = nn.Embedding if update.is_embedding else nn.Linear | Conv1D
    kind = "an embedding" if update.is_embedding else "a linear layer"
    require(isinstance(module, classes), f"The adapter contains an update of {kind} for a {type(module).__name__}.")
    delta = torch.from_numpy(update.up) @ torch.from_numpy(update.down) * update.scale
    return delta if isinstance(module, nn.Linear) else delta.T


def _missing_updates(model: nn.Module, adapter: AdapterFiles, optional: tuple[str, ...]) -> set[str]:
    """Return the names of all weights that an adapter must update or replace by its config."""
    of_module = tuple(f".{name}" for name in adapter.target_modules)
    layers = {name for name, each in model.named_modules() if isinstance(each, nn.Linear | Conv1D | nn.Embedding)}
    saved = {name for name, _ in model.named_parameters() if _is_in(name, adapter.modules_to_save)}
    updated = {f"{name}.weight" for name in layers if f".{name}".endswith(of_module) and not name.startswith(optional)}
    return saved | {name for name in updated if not _is_in(name, adapter.modules_to_save)}


def _is_in(name: str, ends: tuple[str, ...]) -> bool:
    """Return whether a weight is in a module whose name has one of these ends, as PEFT finds ``modules_to_save``."""
    return any(module.endswith(ends) for module in accumulate(name.split(".")[:-1], lambda *names: ".".join(names)))


def _require_none(names: Collection[str], adapter: AdapterFiles, what_is_wrong: str) -> None:
    require(not names, f"The adapter in {adapter.path} {what_is_wrong}: {shown(names)}. Its base is {adapter.base}.")


def _require_shape(name: str, of_base: Tensor, of_adapter: Tensor, adapter: AdapterFiles) -> None:
    shapes = f"{list(of_base.shape)} in the model, but {list(of_adapter.shape)} in the adapter in {adapter.path}"
    require(of_base.shape == of_adapter.shape, f"{name} is {shapes}, whose base is {adapter.base}.")
