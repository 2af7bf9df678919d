"""The real runner in a part's own process, loaded with the settings that a server with the same flags has."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from attrs import frozen

from benchmarks.gpu.settings import Settings
from trio_pool_serve.cli import read_config
from trio_pool_serve.config import Config
from trio_pool_serve.models.folder import read_model_folder
from trio_pool_serve.models.loading.runner_loader import load_transformer
from trio_pool_serve.runner.cuda.graphs import GraphedBackbone
from trio_pool_serve.runner.transformer_runner import TransformerRunner
from trio_pool_serve.threads.offload import Offload
from trio_pool_serve.types import Runner


def runner_arguments(folder: Path, settings: Settings, *more: str) -> list[str]:
    """Return the arguments of ``LoadedRunner.load``, as a job for another process."""
    return [str(folder), *settings.own_flags, *more]


def without_graphs(runner: TransformerRunner) -> TransformerRunner:
    """Switch off a runner's CUDA graphs, before its ``prepare``; otherwise it computes as before."""
    runner.choose_computation()
    runner.capture = None
    if isinstance(runner.compute, GraphedBackbone):
        runner.compute = runner.compute.packed
    return runner


@frozen(eq=False, kw_only=True)
class LoadedRunner:
    """A runner, with what its batches are formed by."""

    runner: Any
    offload: Offload
    config: Config
    batch_tokens: int
    """The token budget of a batch."""

    @classmethod
    async def load(
        cls, arguments: Sequence[str], *, in_this_thread: bool = False, graphs: bool = True
    ) -> "LoadedRunner":
        """Load a model in the launch thread, as a server does. Cancellation: at once; the thread continues to load."""
        config = read_config(arguments)
        offload = Offload()
        loading = config.sources[0].loading
        folder = read_model_folder(Path(config.models[0]), loading)

        def load() -> tuple[Runner, int]:
            runner = load_transformer(folder, loading, offload)
            if not graphs and isinstance(runner, TransformerRunner):
                without_graphs(runner)
            return runner, runner.prepare(config.scheduling.wanted_batch_tokens)

        runner, batch_tokens = load() if in_this_thread else await offload.run("launch", load)
        return cls(runner=runner, offload=offload, config=config, batch_tokens=batch_tokens)

    @property
    def is_on_cpu(self) -> bool:
        """Whether there is no GPU to look at."""
        return self.runner.on_cpu

    def describe(self) -> dict[str, Any]:
        """Return what was loaded, for JSON."""
        return {"model": self.runner.describe(), "batch_tokens": self.batch_tokens, "pads": self.runner.pads}
