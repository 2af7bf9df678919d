"""The modules of a model that pools its states: which ones are supported, and in which order.

sentence-transformers' modules read and write named features. WeightedLayerPooling replaces the transformer's states,
Pooling writes ``VECTOR``, and the modules after it map that. The last module of a cross-encoder writes ``SCORES``.
"""

from collections.abc import Sequence

from trio_pool_serve.errors import ModelLoadError, require
from trio_pool_serve.models.files.folder_files import FolderFiles, ModuleFiles, read_router

VECTOR, SCORES = "sentence_embedding", "scores"

LAYERS = "WeightedLayerPooling"

ROUTES = (
    " The routes of the Router or Asym are {}; accepted: Transformer or StaticEmbedding first, in the first module."
)

AFTER_POOLING = ("Dense", "LayerNorm", "Normalize", "Truncate")
"""The last one is made of ``truncate_dim``."""


def read_pooled_modules(files: FolderFiles, *, writes: str = VECTOR) -> tuple[ModuleFiles, ...]:
    """Return the modules after the transformer, without a WeightedLayerPooling that has no effect.

    Raises ``ModelLoadError`` unless Pooling comes first, or second after WeightedLayerPooling, and the last module
    writes the feature ``writes``.
    """
    modules = files.modules[1:]
    pooled = modules[1:] if has_layers(modules) else modules
    require(
        bool(pooled) and pooled[0].name == "Pooling",
        f"{files.path / 'modules.json'}: the transformer is followed by {names_of(modules)}; accepted: "
        f"optionally {LAYERS}, then Pooling.",
    )
    require_vector_modules(pooled[1:], writes=writes)
    return pooled if ignores_layers(files) else modules


def require_vector_modules(modules: Sequence[ModuleFiles], *, writes: str = VECTOR) -> None:
    """Raise ``ModelLoadError`` unless all of them map a pooled vector, and the last one writes ``writes``."""
    if unknown := [module for module in modules if module.name not in AFTER_POOLING]:
        routes = [
            f"{name}: {names_of(route)}"
            for module in unknown
            if module.name == "Router"
            for name, route in read_router(module.path).routes.items()
        ]
        raise ModelLoadError(
            f"modules.json requires {names_of(unknown)}, which cannot be loaded; accepted: Dense, LayerNorm, "
            f"Normalize and Dropout.{ROUTES.format('; '.join(routes)) if routes else ''}"
        )
    for module in modules:
        source = module.config.get("module_input_name") or VECTOR
        target = module.config.get("module_output_name") or source
        wanted = writes if module is modules[-1] else VECTOR
        require(
            (source, target) == (VECTOR, wanted),
            f"{module.path / 'config.json'}: {module.name} maps {source!r} to {target!r}; accepted: "
            f"{VECTOR!r} to {wanted!r}.",
        )


def has_layers(modules: Sequence[ModuleFiles]) -> bool:
    """Return whether the first module weighs the transformer's layers."""
    return bool(modules) and modules[0].name == LAYERS


def ignores_layers(files: FolderFiles) -> bool:
    """Return whether WeightedLayerPooling has no effect: as in sentence-transformers, if there are no hidden states.

    Raises ``ModelLoadError`` if config.json selects some of the hidden states.
    """
    wanted = files.config.get("output_hidden_states") or False
    require(
        isinstance(wanted, bool) or not has_layers(files.modules[1:]),
        f"{files.transformer_path / 'config.json'}: output_hidden_states is {wanted!r}; with {LAYERS} it may be "
        "true or false.",
    )
    return has_layers(files.modules[1:]) and not wanted


def names_of(modules: Sequence[ModuleFiles]) -> str:
    """Return the names of modules for a message."""
    return ", ".join(module.name for module in modules) or "no module"
