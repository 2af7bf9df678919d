"""The service that the routes use: models, engines, limiters and metrics in one nursery."""

import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Literal, TypeAlias, get_args

import trio
from attrs import AttrsInstance, Factory, asdict, define, field

from trio_pool_serve.access.api_keys import ApiKeys
from trio_pool_serve.config import Config
from trio_pool_serve.engine.gpus import Gpu
from trio_pool_serve.engine.local_device import MAX_IN_FLIGHT
from trio_pool_serve.engine.places.server_places import ServerPlaces
from trio_pool_serve.engine.process_placement import idle_launches_of, replicas_of
from trio_pool_serve.engine.result_cache import ResultCache
from trio_pool_serve.errors import (
    DrainingError,
    EngineDeadError,
    EngineLoadingError,
    ModelLoadError,
    PermissionDeniedError,
    require,
    unwrap_exception_groups,
)
from trio_pool_serve.models.loading.runner_loader import RunnerLoader, load_transformer, loader_name
from trio_pool_serve.processes.socket_folder import SocketFolder
from trio_pool_serve.processes.worker_processes import WorkerProcesses
from trio_pool_serve.rendering.chat import template_sandbox
from trio_pool_serve.rendering.media.loader import MediaLoader
from trio_pool_serve.rendering.memory_budget import MemoryBudget
from trio_pool_serve.runs.batch_api.batch_api import BatchApi
from trio_pool_serve.serving.model_maker import ModelMaker
from trio_pool_serve.serving.served_model import ServedModel
from trio_pool_serve.serving.served_models import MAX_MODELS, ServedModels
from trio_pool_serve.tasks.model import Model
from trio_pool_serve.telemetry.gauges import Gauges
from trio_pool_serve.telemetry.live_samples import LiveHistory
from trio_pool_serve.telemetry.logs import AccessLog
from trio_pool_serve.telemetry.metrics import Metrics, process_gauges, sample_loop_lag, thread_gauges
from trio_pool_serve.telemetry.snapshots import (
    Snapshot,
    api_process_name,
    families_of,
    gather_snapshots,
    process_usage,
    serve_snapshots,
)
from trio_pool_serve.telemetry.tracing import Tracing, is_switched_on
from trio_pool_serve.threads.offload import Offload

logger = logging.getLogger(__name__)

ServiceState: TypeAlias = Literal["dead", "loading", "draining", "stalled", "overloaded", "ready"]

WORST_FIRST: tuple[ServiceState, ...] = get_args(ServiceState)


@define(eq=False)
class Service:
    """The served models: a renderer and an engine for each, and the limiters and metrics that they share.

    The listener may restart around it: the models stay loaded as long as ``run`` runs. A service does not configure its
    process; ``configure_process`` does that for a process that exists to run one.
    """

    config: Config
    load_runner: RunnerLoader = load_transformer
    socket_folder: Path | None = field(default=None, kw_only=True)
    """Folder with the sockets of the server's processes, if the caller supervises the engine processes."""
    api_worker: int = field(default=0, kw_only=True)
    """The index of this API process."""
    gpus: Sequence[Gpu] = field(default=(), kw_only=True)
    """GPUs for the engine processes of this service."""
    offload: Offload = field(kw_only=True)
    on_loaded: Callable[[], object] = field(default=lambda: None, kw_only=True)
    """Called once, after all models are loaded and before the service is ready."""
    reload_hooks: list[Callable[[], Awaitable[None]]] = field(factory=list, init=False)
    """Called by ``reload``, at the same time. Code that reads a file at start adds a function that reads it again."""
    metrics: Metrics = field(factory=Metrics, kw_only=True)
    api_keys: ApiKeys = field(init=False, default=Factory(lambda self: ApiKeys(self.config), takes_self=True))
    access_log: AccessLog = field(
        init=False,
        default=Factory(lambda self: AccessLog(only_failures=not self.config.logging.access_log), takes_self=True),
    )
    tracing: Tracing | None = field(init=False, factory=lambda: Tracing() if is_switched_on() else None)
    memory: MemoryBudget = field(
        init=False,
        default=Factory(
            lambda self: MemoryBudget(
                self.config.scheduling.memory_budget_bytes // self.config.processes.api_workers,
                self.config.network.max_body_bytes,
            ),
            takes_self=True,
        ),
    )
    media: MediaLoader = field(
        init=False,
        default=Factory(
            lambda self: MediaLoader(self.config.input, self.offload, self.memory, self.config.network.max_body_bytes),
            takes_self=True,
        ),
    )
    results: ResultCache = field(
        init=False,
        default=Factory(
            lambda self: ResultCache(self.config.scheduling.result_cache_bytes // self.config.processes.api_workers),
            takes_self=True,
        ),
    )
    """Each API process has its own results and ``memory``, with its share of the configured bytes."""
    batches: BatchApi = field(init=False)
    live: LiveHistory = field(
        init=False, default=Factory(lambda self: LiveHistory(self.snapshots, lambda: self.state), takes_self=True)
    )
    """The last minutes, for the console."""
    started: float = field(factory=time.time, init=False)
    """Seconds since the epoch."""
    processes: dict[str, WorkerProcesses] = field(
        init=False,
        default=Factory(
            lambda self: {
                name: WorkerProcesses(
                    self.config.threads.renderer_num_workers,
                    template_sandbox.prepare,
                    in_processes=self.offload.in_threads,
                    niceness=self.offload.niceness,
                )
                for name in ("template", "client_template")
                if name == "template" or self.config.input.trust_request_chat_template
            },
            takes_self=True,
        ),
    )
    """Worker processes for chat templates: one pool for models' templates, one for requests' templates if trusted."""
    models: ServedModels = field(init=False)
    draining: bool = field(default=False, init=False)
    running_tasks: int = field(default=0, init=False)
    """Number of task requests without a response; lines of batches are not counted."""
    places: ServerPlaces | None = field(default=None, init=False)
    """``None`` if the models compute in this process."""
    _own_socket_folder: SocketFolder | None = field(default=None, init=False)

    @offload.default
    def _make_offload(self) -> Offload:
        changes = self.config.model_changes
        most_loaded = changes.max_loaded_models or (MAX_MODELS if changes.model_api else len(self.config.sources))
        return Offload(
            render=self.config.threads.renderer_num_workers,
            launch=replicas_of(self.config) if self.config.processes.computes_here else 1,
            may_launch_more=self.config.processes.replicas is None,
            idle_launches=idle_launches_of(self.config),
            copy=MAX_IN_FLIGHT * most_loaded,
        )

    def __attrs_post_init__(self) -> None:
        self.offload.observe = self.metrics.observe_hop
        self.reload_hooks.append(partial(self.api_keys.reload, self.offload))
        self.metrics.add_gauges(self._gauges)
        if not self.config.processes.computes_here and self.socket_folder is None:
            # Only this user can enter it: every process that can connect to an engine can make it compute anything.
            self._own_socket_folder = SocketFolder()
            self.socket_folder = Path(self._own_socket_folder.name)
        if self.socket_folder is not None:
            loader = loader_name(self.load_runner) if self._own_socket_folder else None
            self.places = ServerPlaces(self.config, self.socket_folder, self.api_worker, loader, self.gpus)
            if (hosts := self.places.hosts) is not None:
                self.reload_hooks.append(partial(self.offload.reload, "hosts", hosts.read, hosts.keys.path))
        self.batches = BatchApi(self.config, self.offload, None if self._own_socket_folder else self.socket_folder)
        # Lambdas: ``load_runner`` and ``on_loaded`` may be replaced until they are called.
        maker = ModelMaker(
            self.config,
            self.offload,
            self.metrics,
            lambda *arguments: self.load_runner(*arguments),
            self.processes,
            self.media,
            self.memory,
            self.results,
            self.places,
        )
        owns_engines = self.socket_folder is None or self._own_socket_folder is not None
        self.models = ServedModels(maker, owns_engines, lambda: self.on_loaded())

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Read the API keys, then load the models and run their engines until cancelled; ``started`` before loading.

        Raises ``ModelLoadError`` or ``EngineDeadError``, not in a group. Cancellation: at once; waiting requests fail.
        """
        await self.api_keys.load(self.offload)
        task_status.started()
        try:
            # ModelLoadError first: it makes tasks that wait for the engine raise EngineDeadError.
            with unwrap_exception_groups(ModelLoadError, EngineDeadError):
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(sample_loop_lag, self.metrics.loop_lag)
                    nursery.start_soon(self.access_log.run)
                    if self.tracing is not None:
                        nursery.start_soon(self.tracing.run)
                    if self._own_socket_folder is not None:
                        nursery.start_soon(self._own_socket_folder.keep)
                    for processes in self.processes.values():
                        await nursery.start(processes.run)
                    await nursery.start(self.media.cache.run)
                    if self.places is not None and self.socket_folder is not None:
                        await nursery.start(self.places.run, self.offload)
                        nursery.start_soon(serve_snapshots, self.socket_folder, self.snapshot)
                    await nursery.start(self.models.run)
                    await nursery.start(self.batches.run)
        finally:
            if self._own_socket_folder is not None:
                self._own_socket_folder.cleanup()

    @property
    def served(self) -> Mapping[str, ServedModel]:
        """The models by name; the first one is the default."""
        return self.models.by_name

    @property
    def state(self) -> ServiceState:
        """The state that ``/readyz`` reports: the worst of the server and of the engines of models that are loaded."""
        engines = [served.engine for served in self.models.present]
        of_server: Mapping[ServiceState, bool] = {
            "loading": not self.models.are_loaded.is_set(),
            "draining": self.draining,
            "overloaded": any(engine.queue.admission.is_full() for engine in engines),
        }
        states = {engine.state for engine in engines} | {state for state, holds in of_server.items() if holds}
        return next((state for state in WORST_FIRST if state in states), "ready")

    @property
    def is_healthy(self) -> bool:
        """Whether the models are loaded and their engines alive, as ``/health`` reports."""
        return self.state not in ("loading", "dead")

    @property
    def stall_reason(self) -> str:
        """Why the state is stalled; empty if no engine is."""
        return "; ".join(reason for served in self.models.present if (reason := served.engine.devices.stall_reason))

    def model(self, name: str | None = None) -> Model:
        """Return the model with a name, by default the first.

        Requests hold a ``ModelUse``, which keeps it loaded. Raises ``NotFoundError``, and ``EngineLoadingError`` if it
        is not loaded.
        """
        if (model := self.models.loaded_nowait(self.models.find(name))) is None:
            raise EngineLoadingError("The model is not loaded.")
        return model

    async def wait_ready(self) -> None:
        """Wait until the initial models are loaded. Raises ``EngineDeadError`` if an engine has stopped.

        Cancellation: at once; nothing is held.
        """
        await self.models.wait_ready()

    def require_open(self) -> None:
        """Raise ``DrainingError`` if the server is shutting down."""
        require(not self.draining, "The server is shutting down.", DrainingError)

    def require_changes(self) -> None:
        """Raise ``PermissionDeniedError`` or ``DrainingError`` unless models and adapters can be changed now."""
        require(
            self.api_keys.are_needed,
            "Models can be changed by a server with API keys only: see --api-key.",
            PermissionDeniedError,
        )
        self.require_open()

    async def drain(
        self, stop: trio.Event, wait_for_parent: Callable[[], Awaitable[None]] = trio.sleep_forever
    ) -> None:
        """Refuse new requests, and wait while running requests finish. ``stop`` ends the listener, and is set first.

        Connections get as much time from the listener (``listener.py``). Return after ``--drain-timeout-s``, or as soon
        as ``wait_for_parent()`` returns: the caller exits then. Cancellation: at once; the caller cancels it when all
        requests have finished.
        """
        limit_s, running = self.config.time_limits.drain_timeout_s, self.running_tasks
        if has_requests := self.models.are_loaded.is_set():
            logger.info("draining, for at most %g s", limit_s)
        self.draining = True
        stop.set()
        try:
            with trio.move_on_after(limit_s) as limit:
                await wait_for_parent()
            # hypercorn shields its writes: a client that does not read would keep the process alive for ever.
            rows = sum(served.engine.statistics().queued_rows for served in self.served.values())
            reason = "the drain took too long" if limit.cancelled_caught else "the parent is gone"
            logger.warning("exiting with %d rows unfinished: %s", rows, reason)
        finally:
            if has_requests:
                logger.info("stopped", extra={"finished": running - self.running_tasks, "cut": self.running_tasks})

    async def reload(self) -> None:
        """Read the files that the settings name again: call all reload hooks. Failures are logged.

        Cancellation: at once; files that have not been read are not replaced.
        """

        async def call(hook: Callable[[], Awaitable[None]]) -> None:
            try:
                await hook()
            except Exception:
                logger.exception("a file could not be read again")

        async with trio.open_nursery() as nursery:
            for hook in self.reload_hooks:
                nursery.start_soon(call, hook)

    def snapshot(self) -> Snapshot:
        """Return the metrics and the load of this process."""
        load = {
            "server_load": self.running_tasks,
            "models": {name: served.reported_load for name, served in self.served.items()},
            "limiters": {kind: asdict(limiter) for kind, limiter in self.offload.statistics().items()},
            "workers": {name: asdict(processes.statistics()) for name, processes in self.processes.items()},
            **self._shared_statistics(),
            "request_memory_bytes": self.memory.held_bytes,
            "processes": {"server" if self.models.owns_engines else api_process_name(self.api_worker): process_usage()},
        }
        links = [] if self.places is None else self.places.families()
        return Snapshot([*families_of(self.metrics.registry), *links], load)

    async def snapshots(self) -> list[Snapshot]:
        """Return the snapshots of all processes of the server, this one first. Cancellation: at once."""
        others = [] if self.socket_folder is None else await gather_snapshots(self.socket_folder)
        return [self.snapshot(), *([] if self.places is None else self.places.snapshots()), *others]

    def _shared_statistics(self) -> dict[str, dict[str, float]]:
        statistics: dict[str, AttrsInstance] = {
            "media_cache": self.media.cache.statistics(),
            "media_fetches": self.media.fetcher.turns.statistics(),
            "result_cache": self.results.statistics(),
            "batches": self.batches.statistics(),
        }
        return {name: asdict(record) for name, record in statistics.items()}

    def _gauges(self) -> Gauges:
        return {
            **process_gauges(),
            **thread_gauges(
                self.offload.statistics(), {name: workers.statistics() for name, workers in self.processes.items()}
            ),
            **self._shared_statistics(),
            "request_memory_bytes": {"all": self.memory.held_bytes},
            "request_memory_limit_bytes": {"all": self.memory.max_bytes},
        }

    def __repr__(self) -> str:
        engines = ", ".join(f"{name}: {served.engine!r}" for name, served in self.served.items())
        processes = "".join(f", {name}: {workers!r}" for name, workers in self.processes.items())
        return f"<Service {self.state}, {engines}, {self.offload!r}{processes}, {self.media!r}>"
