"""All places of a server as seen by one API process: on this machine, on hosts, and on the nodes of a Ray cluster."""

from collections.abc import Sequence
from pathlib import Path
from secrets import token_hex

import trio
from attrs import define, field

from trio_pool_serve.config import Config
from trio_pool_serve.engine.engine import Engine, ModelQueue
from trio_pool_serve.engine.gpus import Gpu
from trio_pool_serve.engine.places.host_list import HostList
from trio_pool_serve.engine.places.host_places import HostPlaces
from trio_pool_serve.engine.places.queue_scaling import SCALING_S, QueueSeconds
from trio_pool_serve.engine.places.ray_places import ActorPlaces, RayPlacement, key_path
from trio_pool_serve.engine.places.supervisor import LocalPlaces, Supervisor, paths_of
from trio_pool_serve.engine.remote.connectors import file_connector, unix_connector
from trio_pool_serve.engine.remote.greeting import LinkKeys
from trio_pool_serve.engine.remote.remote_workers import RemoteWorkers
from trio_pool_serve.errors import ModelLoadError
from trio_pool_serve.telemetry.metrics import EngineMetrics
from trio_pool_serve.telemetry.snapshots import Family, Snapshot
from trio_pool_serve.threads.offload import Offload


def supervisor_of(config: Config, loader: str, folder: Path, gpus: Sequence[Gpu] = ()) -> Supervisor | RayPlacement:
    """Return the supervisor of a server's engine processes."""
    if config.processes.engine == "ray":
        return RayPlacement(ActorPlaces(config, loader, folder, key=token_hex(32)))
    return LocalPlaces(config, loader, folder, gpus)


@define(eq=False)
class ServerPlaces:
    """Makes the engines of an API process, and keeps the places that they are linked to.

    ``folder`` contains the sockets of the server's processes. ``loader`` is set in the process that starts the engine
    processes, which compute on the ``gpus``; ``worker`` is the index of this API process.
    """

    config: Config
    folder: Path
    worker: int = 0
    loader: str | None = None
    gpus: Sequence[Gpu] = ()
    supervisor: Supervisor | RayPlacement | None = field(init=False, default=None)
    """The supervisor of the engine processes that this process starts, if any."""
    hosts: HostPlaces | None = field(init=False, default=None)
    _engines: list[Engine] = field(init=False, factory=list)
    """The engines in the order of the models."""

    def __attrs_post_init__(self) -> None:
        if self.loader is not None:
            self.supervisor = supervisor_of(self.config, self.loader, self.folder, self.gpus)
        hosts = self.config.hosts
        if hosts.engine_hosts and hosts.key_file is not None:
            self.hosts = HostPlaces(
                HostList(hosts.engine_hosts, self.folder / "hosts.changes"),
                LinkKeys(hosts.key_file),
                self.config.scheduling,
            )

    def make_engine(self, name: str, metrics: EngineMetrics) -> Engine:
        """Return the engine of the next model, in the order of the settings."""
        paths = paths_of(self.config, self.folder, model=len(self._engines))
        connectors = [unix_connector(path) for path in paths]
        if self.config.processes.engine == "ray":
            keys = LinkKeys(key_path(self.folder))
            keys.read()
            connectors = [file_connector(path, keys) for path in paths]
        scheduling = self.config.scheduling
        queue = ModelQueue(scheduling.max_queue_s, metrics, self.config.hosts.zone)
        workers = RemoteWorkers(queue.dispatcher, scheduling, queue=queue, connectors=connectors)
        if self.hosts is not None:
            self.hosts.workers[name] = workers
        engine = Engine(queue, workers)
        self._engines.append(engine)
        return engine

    async def run(self, offload: Offload, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Run the engine processes and the links to hosts, forever; ``started`` once the supervisor has.

        Raises ``ModelLoadError`` or ``EngineDeadError``. Cancellation: at once; the processes exit, or are killed.
        """
        if self.hosts is not None:
            try:
                await offload.run("load", self.hosts.read)
            except (OSError, ValueError) as error:
                raise ModelLoadError(str(error)) from error
        async with trio.open_nursery() as nursery:
            if self.supervisor is not None:
                await nursery.start(self.supervisor.run)
            if self.hosts is not None:
                nursery.start_soon(self.hosts.run)
            if self.config.processes.engine == "ray":
                nursery.start_soon(self._share_queue_seconds)
            task_status.started()

    async def _share_queue_seconds(self) -> None:
        """Share the lengths of this process's queues with the process that adds and drains replicas, forever."""
        workers = self.config.processes.api_workers
        shared = [QueueSeconds.open(self.folder, model, workers) for model in range(len(self._engines))]
        while True:
            for seconds, engine in zip(shared, self._engines, strict=True):
                seconds.write(self.worker, engine.statistics().waiting_s)
            await trio.sleep(SCALING_S)

    def snapshots(self) -> list[Snapshot]:
        """Return the states of the engine processes that this process keeps alive."""
        return [] if self.supervisor is None else [self.supervisor.snapshot()]

    def families(self) -> list[Family]:
        """Return the metrics of this process's links to other machines."""
        return [] if self.hosts is None else self.hosts.families()
