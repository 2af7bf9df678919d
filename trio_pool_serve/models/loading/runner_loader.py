"""What loads a runner, by name where another process is to call it, after the first import of transformers.

This module does not import torch.
"""

import importlib
from collections.abc import Callable
from threading import Lock
from typing import TypeAlias

from trio_pool_serve.config import ModelConfig
from trio_pool_serve.engine.placement import has_gpu
from trio_pool_serve.errors import ModelLoadError
from trio_pool_serve.models.files.exported_files import missing_libraries
from trio_pool_serve.models.loading.cpu_loading import load_on_cpu
from trio_pool_serve.models.model_kind import AnyModelFolder
from trio_pool_serve.threads.offload import Offload
from trio_pool_serve.types import Runner

_importing = Lock()


def import_transformers() -> None:
    """Import transformers, which later imports of any of its names rely on. Blocks; the first time for seconds.

    While it is imported, transformers puts another module in its own place. A thread that has found the first one by
    then, and waits for it, is given that: ``from transformers import AutoTokenizer`` fails in it. So each thread that
    loads calls this before, and the first import is of one thread alone.
    """
    with _importing:
        importlib.import_module("transformers")


RunnerLoader: TypeAlias = Callable[[AnyModelFolder, ModelConfig, Offload], Runner]


def load_transformer(folder: AnyModelFolder, config: ModelConfig, offload: Offload) -> Runner:
    """Load the runner for a transformers model, without ``prepare``; torch is imported only where it computes."""
    if has_gpu(config):
        return load_by_torch(folder, config, offload, "the GPU cannot be used")
    return load_on_cpu(folder, config, offload, load_by_torch)


def load_by_torch(folder: AnyModelFolder, config: ModelConfig, offload: Offload, why_torch: str) -> Runner:
    """Load the runner that computes a model by torch; ``why_torch`` says why that is, on CPU.

    Raises ``ModelLoadError``, also where torch or transformers is not installed.
    """
    if missing := missing_libraries():
        raise ModelLoadError(
            f"Only torch can compute this model here ({why_torch}), and {missing}: pip install torch transformers."
        )
    import_transformers()
    from trio_pool_serve.models.loading.runner_loading import load_runner

    return load_runner(folder, config, offload, why_torch)


def loader_name(load: RunnerLoader) -> str:
    """Return the name (``module:function``) by which another process imports a loader."""
    return f"{load.__module__}:{load.__qualname__}"
