"""Everything behind the routes, as one object with one nursery."""

import gc
import logging
import sys
import time
from collections.abc import Callable
from typing import Literal, TypeAlias

import trio
from attrs import define, field

from trio_pool_serve.config import Config, ModelConfig
from trio_pool_serve.engine.interface import Engine
from trio_pool_serve.engine.local import LocalEngine
from trio_pool_serve.errors import (
    DrainingError,
    EngineDeadError,
    EngineLoadingError,
    ModelLoadError,
    NotFoundError,
    innermost,
)
from trio_pool_serve.model_folder.folder import ModelFolder, read_model_folder
from trio_pool_serve.model_hub import locate_model
from trio_pool_serve.offload import Offload
from trio_pool_serve.rendering.renderer import renderer_of
from trio_pool_serve.rendering.tokenizer import load_tokenizer
from trio_pool_serve.tasks.embed import EmbedTask
from trio_pool_serve.telemetry.loop_lag import sample_loop_lag
from trio_pool_serve.telemetry.metrics import Gauges, Metrics
from trio_pool_serve.types import Runner

logger = logging.getLogger(__name__)

ServiceState: TypeAlias = Literal["loading", "ready", "draining", "dead"]

RunnerLoader: TypeAlias = Callable[[ModelFolder, ModelConfig, Offload], Runner]


def load_transformer(folder: ModelFolder, config: ModelConfig, offload: Offload) -> Runner:
    """Load the runner for a transformers model; torch is imported only here."""
    from trio_pool_serve.runner.loading import load_runner

    return load_runner(folder, config, offload)


@define(eq=False)
class Service:
    """One model, ready to be asked: renderer, engine and tasks, with their limiters and metrics.

    The listener may come and go around it; the model stays loaded for as long as ``run`` runs.
    """

    config: Config
    load_runner: RunnerLoader = load_transformer
    offload: Offload = field(kw_only=True)
    metrics: Metrics = field(factory=Metrics, kw_only=True)
    engine: Engine = field(init=False)
    draining: bool = field(default=False, init=False)
    _embed_task: EmbedTask | None = field(default=None, init=False)

    @offload.default
    def _make_offload(self) -> Offload:
        threads = self.config.threads
        return Offload(
            render=threads.renderer_num_workers,
            postprocess=threads.postprocess_num_workers,
            copy=self.config.scheduling.max_in_flight,
        )

    def __attrs_post_init__(self) -> None:
        self.offload.observe = self.metrics.observe_hop
        self.metrics.add_gauges(self._gauges)
        self.engine = LocalEngine(self._load, self.offload, self.metrics, self.config.scheduling)

    # -- living ---------------------------------------------------------------------------------------

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Load the model and keep the engine going until cancelled; ``started`` before loading.

        Raises ``ModelLoadError`` or ``EngineDeadError``, as themselves. Cancellation: every request that
        waits is failed; nothing is waited for.
        """
        sys.setswitchinterval(self.config.threads.switch_interval_s)
        task_status.started()
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(sample_loop_lag, self.metrics.loop_lag)
                await self.engine.run()
        except* (ModelLoadError, EngineDeadError) as group:
            failure = innermost(group)
        else:
            return
        raise failure

    def _load(self) -> Runner:
        """Find the files, load the tokenizer, load the model. Runs in a thread."""
        began = time.perf_counter()
        config = self.config
        logger.info("loading %s", config.model)
        path = locate_model(config.model, revision=config.loading.revision)
        folder = read_model_folder(path, config.loading)
        tokenizer = load_tokenizer(folder, trust_remote_code=config.loading.trust_remote_code)
        runner = self.load_runner(folder, config.loading, self.offload)
        renderer = renderer_of(folder, tokenizer, self.offload, workers=config.threads.renderer_num_workers)
        self._embed_task = EmbedTask(
            renderer,
            self.engine,
            instructions=folder.prompts,
            default_instruction=folder.prompts.get(folder.default_prompt_name or "", ""),
        )
        # What has been loaded stays: the collector need not look at it again.
        gc.collect()
        gc.freeze()
        logger.info("loaded in %.1f s: %s", time.perf_counter() - began, runner.describe())
        return runner

    # -- being asked ----------------------------------------------------------------------------------

    @property
    def state(self) -> ServiceState:
        """What ``/readyz`` says."""
        state = self.engine.statistics().state
        return "draining" if self.draining and state == "ready" else state

    @property
    def embed_task(self) -> EmbedTask:
        """The embed task; raises ``EngineLoadingError`` until the model is loaded."""
        if self._embed_task is None:
            raise EngineLoadingError("The model is being loaded.")
        return self._embed_task

    def require_open(self) -> None:
        """Raise ``DrainingError`` if no new work is taken."""
        if self.draining:
            raise DrainingError("The server is shutting down.")

    def require_model(self, name: str | None) -> None:
        """Raise ``NotFoundError`` unless ``name`` is this server's model, or not given."""
        if name is not None and name != self.config.served_model_name:
            raise NotFoundError(
                f"The model {name!r} does not exist; this server has {self.config.served_model_name!r}."
            )

    # -- telling --------------------------------------------------------------------------------------

    def _gauges(self) -> Gauges:
        stats = self.offload.statistics()
        return {
            "limiter_capacity": {kind: limiter.capacity for kind, limiter in stats.items()},
            "limiter_borrowed": {kind: limiter.borrowed for kind, limiter in stats.items()},
            "limiter_waiting": {kind: limiter.waiting for kind, limiter in stats.items()},
        }

    def __repr__(self) -> str:
        return f"<Service {self.config.served_model_name} {self.state}, {self.engine!r}, {self.offload!r}>"
