"""The service behind the routes: models, engines, limiters and metrics, in one nursery."""

import logging
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal, TypeAlias

import attrs
import trio
from attrs import Factory, define, field

from trio_pool_serve.access.api_keys import ApiKeys
from trio_pool_serve.batches.batch_api import BatchApi
from trio_pool_serve.config import Config, ModelSource
from trio_pool_serve.engine.deep_probe import DeepProbe
from trio_pool_serve.engine.engine import ENGINE_STATES, Engine
from trio_pool_serve.engine.gpus import Gpu
from trio_pool_serve.engine.local import LocalEngine
from trio_pool_serve.engine.model_results import ModelResults
from trio_pool_serve.engine.placement import idle_launches_of, replicas_of
from trio_pool_serve.engine.remote.remote_engines import RemoteEngines
from trio_pool_serve.engine.result_cache import ResultCache
from trio_pool_serve.errors import (
    DrainingError,
    EngineDeadError,
    EngineLoadingError,
    ModelLoadError,
    NotFoundError,
    unwrap_exception_groups,
)
from trio_pool_serve.models.files.model_digest import digest_of
from trio_pool_serve.models.folder import open_model_folder
from trio_pool_serve.models.loading.local_runners import LocalRunners
from trio_pool_serve.models.loading.renderer_loading import embeds_format_of, renderer_of
from trio_pool_serve.models.loading.runner_loader import RunnerLoader as RunnerLoader
from trio_pool_serve.models.loading.runner_loader import load_transformer as load_transformer
from trio_pool_serve.models.loading.runner_loader import loader_name as loader_name
from trio_pool_serve.models.loading.tokenizer_loading import load_tokenizer
from trio_pool_serve.models.model_kind import AnyModelFolder
from trio_pool_serve.processes.worker_processes import WorkerProcesses
from trio_pool_serve.rendering.chat import template_process
from trio_pool_serve.rendering.chat.chat_templates import ChatTemplates
from trio_pool_serve.rendering.media.loader import MediaLoader
from trio_pool_serve.rendering.memory_budget import MemoryBudget
from trio_pool_serve.rendering.text.tokenizer import Tokenizer
from trio_pool_serve.tasks.model import Model
from trio_pool_serve.telemetry.access_log import AccessLog
from trio_pool_serve.telemetry.gauges import Gauges
from trio_pool_serve.telemetry.metrics import Metrics, process_gauges, sample_loop_lag, thread_gauges
from trio_pool_serve.telemetry.snapshots import Snapshot, families_of, gather_snapshots, serve_snapshots
from trio_pool_serve.telemetry.tracing import Tracing, open_tracing
from trio_pool_serve.threads.offload import Offload
from trio_pool_serve.types import Runner

logger = logging.getLogger(__name__)

ServiceState: TypeAlias = Literal["loading", "ready", "stalled", "overloaded", "draining", "dead"]


def _do_nothing() -> None:
    """Default callback: does nothing."""


@define(eq=False)
class ServedModel:
    """One model of a service: its engine, and its ``Model`` once that is loaded."""

    source: ModelSource
    engine: Engine
    loaded: Model | None = None
    probe: DeepProbe = field(init=False, default=Factory(lambda self: DeepProbe(self.engine), takes_self=True))


@define(eq=False)
class Service:
    """The served models: a renderer and an engine for each, over limiters and metrics that they share.

    The listener may restart around it; the models stay loaded for as long as ``run`` runs. A service configures its
    process only as its allocator and worker processes need: one that exists for it is set up by ``process_setup``.
    """

    config: Config
    load_runner: RunnerLoader = load_transformer
    socket_folder: Path | None = field(default=None, kw_only=True)
    """Where the server's processes have their sockets, if the caller supervises the engine processes."""
    api_worker: int = field(default=0, kw_only=True)
    """The index of this API process."""
    gpus: Sequence[Gpu] = field(default=(), kw_only=True)
    """Those for the engine processes of this service."""
    offload: Offload = field(kw_only=True)
    on_loaded: Callable[[], object] = field(default=_do_nothing, kw_only=True)
    """Called once, when all models are loaded and before the service is ready."""
    reload_hooks: list[Callable[[], Awaitable[None]]] = field(factory=list, init=False)
    """What ``reload`` calls: code that reads a file at start that may change registers here."""
    metrics: Metrics = field(factory=Metrics, kw_only=True)
    api_keys: ApiKeys = field(init=False, default=Factory(lambda self: ApiKeys.of(self.config), takes_self=True))
    access_log: AccessLog = field(init=False)
    tracing: Tracing | None = field(
        init=False, default=Factory(lambda self: open_tracing(self.config.logging), takes_self=True)
    )
    memory: MemoryBudget = field(init=False)
    media: MediaLoader = field(init=False)
    results: ResultCache = field(init=False)
    batches: BatchApi = field(init=False)
    started: float = field(factory=time.time, init=False)
    """Seconds since the epoch."""
    processes: dict[str, WorkerProcesses] = field(init=False)
    """Worker processes for chat templates: one pool for the models' own, one for those of requests if trusted."""
    _is_loaded: trio.Event = field(init=False, factory=trio.Event)
    """Set once all models are loaded."""
    served: dict[str, ServedModel] = field(init=False, factory=dict)
    """By name, in the order of the settings: the first is the default."""
    draining: bool = field(default=False, init=False)
    running_tasks: int = field(default=0, init=False)
    """Number of requests for tasks that have no response yet; lines of batches are not counted."""
    remote: RemoteEngines | None = field(default=None, init=False)
    """``None`` if the models compute in this process."""
    _own_socket_folder: TemporaryDirectory[str] | None = field(default=None, init=False)
    _runners: LocalRunners = field(init=False)

    @offload.default
    def _make_offload(self) -> Offload:
        threads = self.config.threads
        return Offload(
            render=threads.renderer_num_workers,
            media=threads.media_num_workers,
            postprocess=threads.postprocess_num_workers,
            launch=replicas_of(self.config) if self.config.processes.computes_here else 1,
            idle_launches=idle_launches_of(self.config),
            copy=self.config.scheduling.max_in_flight * len(self.config.models),
            takes_turns=self.config.scheduling.fairness == "client",
        )

    @memory.default
    def _make_memory(self) -> MemoryBudget:
        scheduling = self.config.scheduling
        # Memory is each process's own, so each has a part of the budget.
        max_bytes = scheduling.memory_budget_bytes // self.config.processes.api_workers
        return MemoryBudget(max_bytes, scheduling.client_memory_share)

    @results.default
    def _make_results(self) -> ResultCache:
        return ResultCache(self.config.scheduling.result_cache_bytes // self.config.processes.api_workers)

    @processes.default
    def _make_processes(self) -> dict[str, WorkerProcesses]:
        return {
            name: WorkerProcesses(
                self.config.threads.renderer_num_workers,
                template_process.prepare,
                in_processes=self.offload.in_threads,
                niceness=self.offload.niceness,
            )
            for name in ("template", "client_template")
            if name == "template" or self.config.input.trust_request_chat_template
        }

    def __attrs_post_init__(self) -> None:
        self.offload.observe = self.metrics.observe_hop
        logging_config = self.config.logging
        self.access_log = AccessLog(logging_config.access_log_rate, only_failures=not logging_config.access_log)
        self.reload_hooks.append(partial(self.api_keys.reload, self.offload))
        self.media = MediaLoader(self.config.input, self.config.time_limits.media_timeout_s, self.offload, self.memory)
        self.metrics.add_gauges(self._gauges)
        self.metrics.add_gauges(process_gauges)
        if not self.config.processes.computes_here and self.socket_folder is None:
            # Only this user can enter it: a process that can connect to an engine can have it compute anything.
            self._own_socket_folder = TemporaryDirectory(prefix="trio_pool_serve-")
            self.socket_folder = Path(self._own_socket_folder.name)
        if self.socket_folder is not None:
            loader = loader_name(self.load_runner) if self._own_socket_folder else None
            self.remote = RemoteEngines(self.config, self.socket_folder, self.api_worker, loader, self.gpus)
            self.reload_hooks.append(partial(self.remote.reload, self.offload))
        self._runners = LocalRunners(self.config, self.offload)
        self.batches = BatchApi(self.config, self.offload, None if self._own_socket_folder else self.socket_folder)
        for number, source in enumerate(self.config.sources):
            self.served[source.name] = ServedModel(source, self._make_engine(number, source))

    def _make_engine(self, number: int, source: ModelSource) -> Engine:
        metrics = self.metrics.of_engine(source.name)
        engine: Engine
        if self.remote is not None:
            engine = self.remote.make_engine(number, source.name, metrics)
        else:
            engine = LocalEngine(partial(self._load_runner, source), self.offload, metrics, self.config.scheduling)
        metrics.add_gauges(lambda: {"model": {state: float(engine.state == state) for state in ENGINE_STATES}})
        return engine

    def _load_runner(self, source: ModelSource) -> Runner:
        return self._runners.load(source, self.load_runner)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Read the API keys, then load the models and run their engines until cancelled; ``started`` before loading.

        Raises ``ModelLoadError`` or ``EngineDeadError``, not in a group. Cancellation: at once; every request that
        waits fails.
        """
        await self.api_keys.start(self.offload)
        task_status.started()
        try:
            # ModelLoadError first: tasks that wait for the engine raise EngineDeadError because of it.
            with unwrap_exception_groups(ModelLoadError, EngineDeadError):
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(sample_loop_lag, self.metrics.loop_lag)
                    nursery.start_soon(self.access_log.run)
                    if self.tracing is not None:
                        nursery.start_soon(self.tracing.run)
                    for processes in self.processes.values():
                        await nursery.start(processes.run)
                    await nursery.start(self.media.run)
                    if self.remote is not None and self.socket_folder is not None:
                        await nursery.start(self.remote.run, self.offload)
                        nursery.start_soon(serve_snapshots, self.socket_folder, self.snapshot)
                    for served in self.served.values():
                        # In this order local engines queue for the one thread that loads.
                        await nursery.start(served.engine.run)
                        nursery.start_soon(served.probe.run)
                    await nursery.start(self.batches.run)
                    await self._load()
        finally:
            if self._own_socket_folder is not None:
                self._own_socket_folder.cleanup()

    async def _load(self) -> None:
        """Load the renderer of each model while its engine loads. Raises ``ModelLoadError``."""
        async with trio.open_nursery() as loading:
            for served in self.served.values():
                loading.start_soon(self._load_model, served)
        self.on_loaded()
        self._is_loaded.set()

    async def _load_model(self, served: ServedModel) -> None:
        folder, tokenizer = await self.offload.run("load", partial(self._load_tokenizer, served.source))
        if folder.spec.assumption and self._owns_engines:
            logger.warning("%s: %s", served.source.name, folder.spec.assumption)
        if self.remote is not None and self.remote.hosts is not None:
            digest = await self.offload.run("load", partial(digest_of, folder.path, self.config.loading))
            self.remote.hosts.serve(served.source.name, digest)
        await served.engine.wait_ready()
        served.loaded = await self.offload.run("load", partial(self._make_model, served, folder, tokenizer))

    def _load_tokenizer(self, source: ModelSource) -> tuple[AnyModelFolder, Tokenizer]:
        """Open the model's folder and load its tokenizer. Runs in a thread."""
        folder = open_model_folder(source.location, self.config.loading)
        return folder, load_tokenizer(folder, trust_remote_code=self.config.loading.trust_remote_code)

    def _make_model(self, served: ServedModel, folder: AnyModelFolder, tokenizer: Tokenizer) -> Model:
        config = self.config
        return Model(
            served.source.name,
            folder,
            renderer_of(
                folder,
                tokenizer,
                self.offload,
                workers=config.threads.renderer_num_workers,
                templates=ChatTemplates(
                    self.processes["template"],
                    self.processes.get("client_template", self.processes["template"]),
                    self.offload,
                    config.time_limits.template_timeout_s,
                ),
                settings=config.input,
                media=self.media,
                image_format=folder.kind.image_format(folder),
                memory=self.memory,
                embeds_format=embeds_format_of(
                    folder, served.engine.embeds_width, enabled=config.input.enable_prompt_embeds
                ),
            ),
            served.engine,
            splits_long_texts=config.loading.long_text == "chunk",
            truncates_by_default=config.network.truncate_by_default,
            results=ModelResults(self.results) if self.results.max_bytes else None,
        )

    @property
    def _owns_engines(self) -> bool:
        """Whether no other process of the server loads the same models for the same requests."""
        return self.socket_folder is None or self._own_socket_folder is not None

    @property
    def default(self) -> ServedModel:
        """The model for requests that name none."""
        return next(iter(self.served.values()))

    @property
    def state(self) -> ServiceState:
        """The state that ``/readyz`` reports: the worst state of the engines."""
        engines = [served.engine for served in self.served.values()]
        states = {engine.state for engine in engines}
        state = next(state for state in ("dead", "loading", "stalled", "ready") if state in states)
        if state == "dead" or not self._is_loaded.is_set():
            return "dead" if state == "dead" else "loading"
        if self.draining and state != "loading":
            return "draining"
        return "overloaded" if state == "ready" and any(engine.is_overloaded() for engine in engines) else state

    @property
    def stall_reason(self) -> str:
        """Why the state is stalled; empty if no engine's is."""
        return "; ".join(reason for served in self.served.values() if (reason := served.engine.stall_reason))

    def model(self, name: str | None = None, *, among: Collection[str] | None = None) -> Model:
        """Return the model of that name, by default the first; only those ``among`` the names are there, if given.

        An empty name is none. Raises ``NotFoundError``, or ``EngineLoadingError`` until all models are loaded: while
        one loads, the others cannot compute.
        """
        models = self.models(among)
        served = self.named(name) if name else models[0]
        if served is None and self.config.network.accept_any_model:
            served = models[0]
        if served not in models:
            known = ", ".join(model.source.name for model in models)
            raise NotFoundError(f"The model `{name}` does not exist. This server has: {known}.")
        if served.loaded is None or any(each.engine.state == "loading" for each in self.served.values()):
            raise EngineLoadingError("The model is being loaded.")
        return served.loaded

    def models(self, among: Collection[str] | None = None) -> list[ServedModel]:
        """Return the models in the order of the settings; only those with a name ``among`` those, if given."""
        return [
            served
            for served in self.served.values()
            if among is None or any(name in among for name in (served.source.name, *served.source.aliases))
        ]

    def named(self, name: str) -> ServedModel | None:
        """Return the model that has a name, its first or another."""
        return self.served.get(name) or next(
            (served for served in self.served.values() if name in served.source.aliases), None
        )

    async def wait_ready(self) -> None:
        """Wait until all models are loaded. Raises ``EngineDeadError`` if an engine has stopped.

        Cancellation: at once; nothing is held.
        """
        for served in self.served.values():
            await served.engine.wait_ready()
        await self._is_loaded.wait()

    def require_open(self) -> None:
        """Raise ``DrainingError`` if the server is shutting down."""
        if self.draining:
            raise DrainingError("The server is shutting down.")

    async def reload(self) -> None:
        """Read the files again that the settings name: call every reload hook. One that fails is logged.

        Cancellation: at once; the hooks that have not been called yet are not called.
        """
        for hook in self.reload_hooks:
            try:
                await hook()
            except Exception:
                logger.exception("a file was not read again")

    def snapshot(self) -> Snapshot:
        """Return the metrics and the load of this process."""
        self.metrics.take_gauges()
        load = {
            "server_load": self.running_tasks,
            "models": {name: served.engine.reported_load for name, served in self.served.items()},
            "limiters": {kind: attrs.asdict(limiter) for kind, limiter in self.offload.statistics().items()},
            "workers": {name: attrs.asdict(processes.statistics()) for name, processes in self.processes.items()},
            "media_cache": attrs.asdict(self.media.cache.statistics()),
            "media_fetches": attrs.asdict(self.media.fetcher.statistics()),
            "result_cache": attrs.asdict(self.results.statistics()),
            "request_memory_bytes": self.memory.held_bytes,
            "batches": attrs.asdict(self.batches.statistics()),
        }
        return Snapshot(families_of(self.metrics.registry), load)

    async def snapshots(self) -> list[Snapshot]:
        """Return the snapshots of all processes of the server, this one first. Cancellation: at once."""
        others = [] if self.socket_folder is None else await gather_snapshots(self.socket_folder)
        return [self.snapshot(), *([] if self.remote is None else self.remote.snapshots()), *others]

    def _gauges(self) -> Gauges:
        workers = {name: processes.statistics() for name, processes in self.processes.items()}
        return {
            **thread_gauges(self.offload.statistics(), workers),
            "media_cache": attrs.asdict(self.media.cache.statistics()),
            "media_fetches": attrs.asdict(self.media.fetcher.statistics()),
            "result_cache": attrs.asdict(self.results.statistics()),
            "request_memory_bytes": {"all": self.memory.held_bytes},
            "request_memory_limit_bytes": {"all": self.memory.max_bytes},
            "batches": attrs.asdict(self.batches.statistics()),
        }

    def __repr__(self) -> str:
        engines = ", ".join(f"{name}: {served.engine!r}" for name, served in self.served.items())
        processes = "".join(f", {name}: {workers!r}" for name, workers in self.processes.items())
        return f"<Service {self.state}, {engines}, {self.offload!r}{processes}, {self.media!r}>"
