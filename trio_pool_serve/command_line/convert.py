"""The command ``convert``: converts a model for CPU before its first start, and prints the decision."""

import logging
import sys
import time

from rich.console import Console

from trio_pool_serve.config import Config, ModelConfig
from trio_pool_serve.engine.process_placement import has_gpu, replicas_of
from trio_pool_serve.errors import ModelLoadError, require
from trio_pool_serve.models.files.exported_files import missing_libraries
from trio_pool_serve.models.folder import open_model_folder
from trio_pool_serve.models.loading.openvino_loading import CpuModel
from trio_pool_serve.models.loading.tokenizer_loading import load_tokenizer
from trio_pool_serve.storage.model_cache import ModelCache
from trio_pool_serve.telemetry.start_display import show_steps_with
from trio_pool_serve.threads.offload import Offload
from trio_pool_serve.types import Prepare, RunnerParams


class _TorchComputesError(Exception):
    """Torch computes the model; the message is the reason."""


def run_convert(config: Config) -> int:
    """Convert a model and its tokenizer, unless the cache has them; return the exit status: 1 if it cannot be served.

    Blocks for seconds, for minutes in int8.
    """
    (source,) = config.sources
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    began = time.monotonic()
    try:
        with console.status(f"converting {source.name}") as status:
            show_steps_with(lambda step: status.update(f"converting {source.name}: {step}"))
            offload = Offload(launch=replicas_of(config), may_launch_more=config.processes.replicas is None)
            decided = _convert(source.location, source.loading, offload)
    except ModelLoadError as error:
        console.print(f"trio-pool-serve: {error}", style="red", markup=False)
        return 1
    sys.stdout.write(f"{source.name}: {decided} ({time.monotonic() - began:.1f} s)\n")
    return 0


def _convert(location: str, loading: ModelConfig, offload: Offload) -> str:
    """Return the decision about a model. Raises ``ModelLoadError``."""
    require(not has_gpu(loading), "Models are converted for CPU only; use --device cpu on a machine with a GPU.")
    if (cache := ModelCache.of(loading.cache_dir)) is None:
        raise ModelLoadError("--cache-dir is empty: name the directory for the converted model.")
    folder = open_model_folder(location, loading)
    if folder.kind.open_runner:
        return "nothing is converted: OpenVINO does not compute this kind of model"
    load_tokenizer(folder, trust_remote_code=loading.trust_remote_code, cache=cache)

    def by_torch(*arguments: object) -> Prepare:
        if missing := missing_libraries():
            raise ModelLoadError(f"Only torch can compute this model ({arguments[-1]}), but {missing}.")
        raise _TorchComputesError(arguments[-1])

    try:
        runner = CpuModel(folder, loading, offload, by_torch).open()(RunnerParams())
    except _TorchComputesError as reason:
        return f"nothing is converted; torch computes this model: {reason}"
    return f"{runner.facts}; saved in {cache.folder}"
