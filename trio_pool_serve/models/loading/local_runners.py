"""Loads runners that compute in threads of this process."""

import logging
import sys

from attrs import define, field

from trio_pool_serve.config import Config, ModelSource
from trio_pool_serve.models.folder import open_model_folder
from trio_pool_serve.models.loading.runner_loader import RunnerLoader
from trio_pool_serve.processes.allocator import collect_garbage, return_freed_memory
from trio_pool_serve.runner.shared_cores import SharedCores, SharingRunner, usable_cores
from trio_pool_serve.threads.offload import Offload
from trio_pool_serve.types import Runner

logger = logging.getLogger(__name__)


def load_model(config: Config, source: ModelSource, load_runner: RunnerLoader, offload: Offload) -> Runner:
    """Open a model's folder and load its runner with ``load_runner``. Blocks. Raises ``ModelLoadError``."""
    folder = open_model_folder(source.location, source.loading)
    runner = load_runner(folder, source.loading, offload)
    accept_embeds = getattr(runner, "accept_embeds", None)  # others need nothing for that
    if accept_embeds is not None and config.input.enable_prompt_embeds and folder.spec.supports_prompt_embeds:
        accept_embeds()
    return runner


@define(eq=False)
class LocalRunners:
    """The runners of one process, which share its cores and the threads of ``offload``."""

    config: Config
    offload: Offload
    _unused_cores: list[SharedCores] | None = field(init=False, default=None)
    """One for each launch thread that computes nothing; ``None`` before there are any."""

    def load(self, source: ModelSource, load_runner: RunnerLoader) -> Runner:
        """Load a model as ``load_model``."""
        logger.info("loading %s", source.name)
        if self._unused_cores is not None and (torch := sys.modules.get("torch")) is not None:
            # What a launch thread has set for its own batch, threads that are started later have as well.
            torch.set_num_threads(usable_cores())
        runner = load_model(self.config, source, load_runner, self.offload)
        if runner.on_cpu and self.offload.launch > 1:
            if self._unused_cores is None:
                self._unused_cores = SharedCores.private(self.offload.launch)
            runner = SharingRunner(runner, self._unused_cores)
        return runner

    def free(self, *, was_frozen: bool) -> None:
        """Return the memory of a runner that nothing refers to any more. Blocks.

        ``was_frozen``: whether its objects are exempt from garbage collection.
        """
        collect_garbage(thaws=was_frozen)
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_initialized():
            torch.cuda.empty_cache()
        return_freed_memory()
