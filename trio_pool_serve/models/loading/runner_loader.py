"""What loads a runner, by name where another process is to call it. Does not import torch."""

from collections.abc import Callable
from typing import TypeAlias

from trio_pool_serve.config import ModelConfig
from trio_pool_serve.models.loading.first_import import import_transformers
from trio_pool_serve.models.model_kind import AnyModelFolder
from trio_pool_serve.threads.offload import Offload
from trio_pool_serve.types import Runner

RunnerLoader: TypeAlias = Callable[[AnyModelFolder, ModelConfig, Offload], Runner]


def load_transformer(folder: AnyModelFolder, config: ModelConfig, offload: Offload) -> Runner:
    """Load the runner for a transformers model, without ``prepare``; torch is imported only here."""
    import_transformers()
    from trio_pool_serve.models.loading.runner_loading import load_runner

    return load_runner(folder, config, offload)


def loader_name(load: RunnerLoader) -> str:
    """Return the name (``module:function``) by which another process imports a loader."""
    return f"{load.__module__}:{load.__qualname__}"
