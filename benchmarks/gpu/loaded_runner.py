"""The real runner in a part's own process, loaded with the settings that a server with the same flags has."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from attrs import evolve, frozen

from benchmarks.bert_shapes import MAX_TOKENS, parameters_of
from benchmarks.gpu.settings import Settings
from trio_pool_serve.cli import read_config
from trio_pool_serve.config import Config
from trio_pool_serve.config.computing_config import GPU_BATCH_TOKENS
from trio_pool_serve.models.folder import read_model_folder
from trio_pool_serve.models.loading.runner_loader import load_transformer
from trio_pool_serve.models.loading.torch_loading import load_unfitted
from trio_pool_serve.runner.cuda.graphs import GraphedBackbone, shapes_to_capture
from trio_pool_serve.runner.cuda.packed_inputs import PackedShape
from trio_pool_serve.runner.transformer_runner import TransformerRunner
from trio_pool_serve.threads.offload import Offload
from trio_pool_serve.types import Runner, RunnerParams


def runner_arguments(folder: Path, settings: Settings, *more: str) -> list[str]:
    """Return the arguments of ``LoadedRunner.load``, as a job for another process."""
    return [str(folder), *settings.own_flags, *more]


def without_graphs(runner: TransformerRunner) -> TransformerRunner:
    """Return a runner that is not fitted yet without its CUDA graphs."""
    compute = runner.compute.packed if isinstance(runner.compute, GraphedBackbone) else runner.compute
    return evolve(runner, compute=compute, capture=None)


def graph_shapes(folder: Path, settings: Settings) -> list[PackedShape]:
    """Return the shapes of the CUDA graphs that a server captures for a model of ``bert_shapes``."""
    config = read_config(runner_arguments(folder, settings))
    return shapes_to_capture(
        parameters=parameters_of(folder),
        max_tokens=MAX_TOKENS,
        max_batch_tokens=config.scheduling.wanted_batch_tokens or GPU_BATCH_TOKENS,
    )


@frozen(eq=False, kw_only=True)
class LoadedRunner:
    """A runner, with what its batches are formed by."""

    runner: Any
    offload: Offload
    config: Config

    @classmethod
    async def load(
        cls, arguments: Sequence[str], *, in_this_thread: bool = False, graphs: bool = True
    ) -> "LoadedRunner":
        """Load a model in the launch thread, as a server does. Cancellation: at once; the thread continues to load."""
        config = read_config(arguments)
        offload = Offload()
        loading = config.sources[0].loading
        folder = read_model_folder(Path(config.models[0]), loading)

        def load() -> Runner:
            wanted = config.scheduling.wanted_batch_tokens
            if graphs:
                return load_transformer(folder, loading, offload)(RunnerParams(wanted))
            return without_graphs(load_unfitted(folder, loading, offload)()).fitted(wanted)

        runner = load() if in_this_thread else await offload.run("launch", load)
        return cls(runner=runner, offload=offload, config=config)

    @property
    def is_on_cpu(self) -> bool:
        """Whether there is no GPU to look at."""
        return bool(self.runner.facts.on_cpu)

    @property
    def batch_tokens(self) -> int:
        """The token budget of a batch."""
        return int(self.runner.facts.max_batch_tokens)

    def describe(self) -> dict[str, Any]:
        """Return what was loaded, for JSON."""
        return {"model": str(self.runner.facts), "batch_tokens": self.batch_tokens, "pads": self.runner.facts.pads}
