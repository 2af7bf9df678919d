"""Loading runners, in threads of this process or by name in another one.

This module does not import torch.
"""

import logging
import sys
from collections.abc import Callable
from pkgutil import resolve_name
from typing import TypeAlias

from attrs import define, field

from trio_pool_serve.config import Config, ModelConfig, ModelSource
from trio_pool_serve.engine.placement import has_gpu
from trio_pool_serve.errors import ModelLoadError
from trio_pool_serve.models.files.exported_files import missing_libraries
from trio_pool_serve.models.folder import open_model_folder
from trio_pool_serve.models.loading.architectures import import_transformers
from trio_pool_serve.models.loading.openvino_loading import CpuModel
from trio_pool_serve.models.model_kind import AnyModelFolder
from trio_pool_serve.processes.allocator import collect_garbage, return_freed_memory
from trio_pool_serve.runner.shared_cores import SharedCores, SharingRunner, usable_cores
from trio_pool_serve.telemetry.start_display import report_phase, report_step
from trio_pool_serve.threads.offload import Offload
from trio_pool_serve.types import Runner

logger = logging.getLogger(__name__)

RunnerLoader: TypeAlias = Callable[[AnyModelFolder, ModelConfig, Offload], Runner]


def load_transformer(folder: AnyModelFolder, config: ModelConfig, offload: Offload) -> Runner:
    """Load the runner of a model, without ``prepare``; torch is imported only if it computes."""
    if folder.kind.open_runner:
        runner: Runner = resolve_name(folder.kind.open_runner)(folder, config, offload)
        return runner
    if has_gpu(config):
        return load_by_torch(folder, config, offload, "the GPU cannot be used")
    return CpuModel(folder, config, offload, load_by_torch).open()


def load_by_torch(folder: AnyModelFolder, config: ModelConfig, offload: Offload, why_torch: str) -> Runner:
    """Load the runner that computes a model with torch; ``why_torch`` is the reason, on CPU.

    Raises ``ModelLoadError``, also if torch or transformers is not installed.
    """
    if missing := missing_libraries():
        raise ModelLoadError(
            f"Only torch can compute this model here ({why_torch}), but {missing}. Run pip install torch transformers."
        )
    report_step("importing torch")
    import_transformers()
    from trio_pool_serve.models.loading.torch_loading import load_runner

    return load_runner(folder, config, offload, why_torch)


def loader_name(load: RunnerLoader) -> str:
    """Return the name (``module:function``) by which another process imports a loader."""
    return f"{load.__module__}:{load.__qualname__}"


def load_model(config: Config, source: ModelSource, load_runner: RunnerLoader, offload: Offload) -> Runner:
    """Open a model's folder and load its runner with ``load_runner``. Blocks. Raises ``ModelLoadError``."""
    folder = open_model_folder(source.location, source.loading)
    runner = load_runner(folder, source.loading, offload)
    accept_embeds = getattr(runner, "accept_embeds", None)  # other runners accept them as they are
    if accept_embeds is not None and config.input.enable_prompt_embeds and folder.spec.supports_prompt_embeds:
        accept_embeds()
    return runner


@define(eq=False)
class LocalRunners:
    """The runners of one process, which share its cores and the threads of ``offload``."""

    config: Config
    offload: Offload
    _unused_cores: list[SharedCores] | None = field(init=False, default=None)
    """One for each idle launch thread; ``None`` before there are any."""

    def load(self, source: ModelSource, load_runner: RunnerLoader) -> Runner:
        """Load a model as ``load_model``."""
        logger.info("loading %s", source.name)
        report_phase(f"Loading {source.name}")
        if self._unused_cores is not None and (torch := sys.modules.get("torch")) is not None:
            # Threads that start later inherit what a launch thread has set for its batch.
            torch.set_num_threads(usable_cores())
        runner = load_model(self.config, source, load_runner, self.offload)
        if runner.on_cpu and self.offload.launch > 1:
            if self._unused_cores is None:
                self._unused_cores = SharedCores.private(self.offload.launch)
            runner = SharingRunner(runner, self._unused_cores)
        return runner

    def free(self, *, was_frozen: bool) -> None:
        """Free the memory of a runner that nothing refers to any more. Blocks.

        ``was_frozen``: whether its objects are exempt from garbage collection.
        """
        collect_garbage(thaws=was_frozen)
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_initialized():
            torch.cuda.empty_cache()
        return_freed_memory()
