"""Loading runners, in threads of this process or by name in another one.

This module does not import torch.
"""

import logging
import sys
from collections.abc import Callable
from pkgutil import resolve_name
from typing import TypeAlias, cast

from attrs import define, evolve, field

from trio_pool_serve.config import Config, ModelConfig, ModelSource
from trio_pool_serve.engine.process_placement import has_gpu
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
from trio_pool_serve.types import Prepare, Runner

logger = logging.getLogger(__name__)

RunnerLoader: TypeAlias = Callable[[AnyModelFolder, ModelConfig, Offload], Prepare]
"""Does the first step of loading, after which most errors are known. Raises ``ModelLoadError``."""


def load_transformer(folder: AnyModelFolder, config: ModelConfig, offload: Offload) -> Prepare:
    """Load a model for whatever computes it best; torch is imported only if it computes."""
    if folder.kind.open_runner:
        return cast("RunnerLoader", resolve_name(folder.kind.open_runner))(folder, config, offload)
    if has_gpu(config):
        return load_by_torch(folder, config, offload, "the GPU cannot be used")
    return CpuModel(folder, config, offload, load_by_torch).open()


def load_by_torch(folder: AnyModelFolder, config: ModelConfig, offload: Offload, why_torch: str) -> Prepare:
    """Load a model with torch; ``why_torch`` is the reason, on CPU.

    Raises ``ModelLoadError``, also if torch or transformers is not installed.
    """
    if missing := missing_libraries():
        raise ModelLoadError(
            f"Only torch can compute this model here ({why_torch}), but {missing}. Run pip install torch transformers."
        )
    report_step("importing torch")
    import_transformers()
    from trio_pool_serve.models.loading.torch_loading import load_unfitted

    choose = load_unfitted(folder, config, offload, why_torch)
    return lambda params: choose().fitted(params.max_batch_tokens, params.memory_share)


def loader_name(load: RunnerLoader) -> str:
    """Return the name (``module:function``) by which another process imports a loader."""
    return f"{load.__module__}:{load.__qualname__}"


def load_model(config: Config, source: ModelSource, load_runner: RunnerLoader, offload: Offload) -> Prepare:
    """Open a model's folder and load it with ``load_runner``. Blocks. Raises ``ModelLoadError``."""
    folder = open_model_folder(source.location, source.loading)
    prepare = load_runner(folder, source.loading, offload)
    takes_embeds = config.input.enable_prompt_embeds and folder.spec.supports_prompt_embeds
    return lambda params: prepare(evolve(params, takes_embeds=takes_embeds))


@define(eq=False)
class LocalRunners:
    """The runners of one process, which share its cores and the threads of ``offload``."""

    config: Config
    offload: Offload
    _unused_cores: list[SharedCores] = field(init=False, factory=list)
    """One for each idle launch thread, once several are known to share the cores."""
    _sharers: int = field(init=False, default=0)

    def load(self, source: ModelSource, load_runner: RunnerLoader) -> Prepare:
        """Load a model as ``load_model``. If there are several launch threads, its batches share the cores."""
        logger.info("loading %s", source.name)
        report_phase(f"Loading {source.name}")
        if self._sharers and (torch := sys.modules.get("torch")) is not None:
            # A launch thread has set another number for its batch, which threads that start later inherit.
            torch.set_num_threads(usable_cores())
        prepare = load_model(self.config, source, load_runner, self.offload)
        return lambda params: self._sharing(prepare(params))

    def _sharing(self, runner: Runner) -> Runner:
        if not runner.facts.on_cpu or self.offload.launch == 1:
            return runner
        if self.offload.launch > self._sharers:  # loading may find that more batches at a time are better
            self._sharers = self.offload.launch
            self._unused_cores[:] = SharedCores.private(self._sharers)
        return SharingRunner(runner, self._unused_cores)

    def free(self, *, was_frozen: bool) -> None:
        """Free the memory of a runner that nothing refers to any more. Blocks.

        ``was_frozen``: whether its objects are exempt from garbage collection.
        """
        collect_garbage(thaws=was_frozen)
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_initialized():
            torch.cuda.empty_cache()
        return_freed_memory()
