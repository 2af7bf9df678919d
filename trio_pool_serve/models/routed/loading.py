"""Loading models with a Router: a runner for each route."""

from functools import partial

from trio_pool_serve.config import ModelConfig
from trio_pool_serve.errors import ModelLoadError, require
from trio_pool_serve.models.loading.runner_loader import load_by_torch, load_transformer
from trio_pool_serve.models.model_kind import ModelFolder
from trio_pool_serve.models.routed import Routed
from trio_pool_serve.runner.routed_runner import RoutedRunner
from trio_pool_serve.threads.offload import Offload
from trio_pool_serve.types import Prepare, RunnerParams


def open_routed(folder: ModelFolder[Routed], config: ModelConfig, offload: Offload) -> Prepare:
    """Load the models of the routes. Blocks for seconds. Raises ``ModelLoadError``."""
    for flag, value, refused in (("backend", config.backend, "openvino"), ("dtype", config.dtype, "int8")):
        require(value != refused, f"--{flag} {value} does not apply to a Router: torch computes its transformers.")
    routes = []
    for route in folder.routes:
        require(
            route.spec.scoring == "vectors" and not route.reads_images and not route.spec.uses_chat_template,
            f"The route of {route.transformer_path} is not a plain embedding model of texts.",
        )
        by_torch = partial(load_by_torch, why_torch="it is a route of a Router")
        routes.append((load_transformer if route.kind.open_runner else by_torch)(route, config, offload))

    def prepare(params: RunnerParams) -> RoutedRunner:
        runners = [prepare_route(params) for prepare_route in routes]
        if len(widths := sorted({runner.facts.dimensions for runner in runners})) > 1:
            raise ModelLoadError(f"The routes have vectors of different lengths: {', '.join(map(str, widths))}.")
        return RoutedRunner(runners)

    return prepare
