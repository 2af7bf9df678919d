"""The engines of a server whose models are not computed in the API process: in processes of this machine, on hosts."""

import logging
from collections.abc import Sequence
from pathlib import Path

import trio
from attrs import define, field

from trio_pool_serve.config import Config
from trio_pool_serve.engine.gpus import Gpu
from trio_pool_serve.engine.remote.engine_hosts import EngineHosts
from trio_pool_serve.engine.remote.keys import LinkKeys
from trio_pool_serve.engine.remote.process_engine import ProcessEngine
from trio_pool_serve.engine.remote.queue_scaling import QueueSeconds
from trio_pool_serve.engine.remote.ray_engines import SCALING_S, seconds_path
from trio_pool_serve.engine.remote.ray_placement import RayPlacement
from trio_pool_serve.engine.remote.supervision import EngineProcesses
from trio_pool_serve.engine.remote.supervisor import Supervisor, connectors_of
from trio_pool_serve.engine.waiting_work import WaitingWork
from trio_pool_serve.errors import ModelLoadError
from trio_pool_serve.telemetry.metrics import EngineMetrics
from trio_pool_serve.telemetry.snapshots import Snapshot
from trio_pool_serve.threads.offload import Offload

logger = logging.getLogger(__name__)


def supervisor_of(config: Config, loader: str, folder: Path, gpus: Sequence[Gpu] = ()) -> Supervisor:
    """Return what starts the engine processes of a server."""
    if config.processes.engine == "ray":
        return RayPlacement(config, loader, folder)
    return EngineProcesses(config, loader, folder, gpus)


@define(eq=False)
class RemoteEngines:
    """Makes the engines of an API process, and runs what they are linked to.

    ``folder`` has the sockets of the server's processes. ``loader`` is given in the process that starts engine
    processes, which are on the ``gpus``; ``worker`` is the index of this API process.
    """

    config: Config
    folder: Path
    worker: int = 0
    loader: str | None = None
    gpus: Sequence[Gpu] = ()
    processes: Supervisor | None = field(init=False, default=None)
    """Those that this process starts."""
    hosts: EngineHosts | None = field(init=False, default=None)

    _engines: list[ProcessEngine] = field(init=False, factory=list)
    """In the order of the models."""

    def __attrs_post_init__(self) -> None:
        if self.loader is not None:
            self.processes = supervisor_of(self.config, self.loader, self.folder, self.gpus)
        hosts = self.config.hosts
        if hosts.engine_hosts and hosts.key_file is not None:
            keys = LinkKeys(hosts.key_file)
            self.hosts = EngineHosts(hosts, keys, self.folder, self.config.scheduling)

    def make_engine(self, model: int, name: str, metrics: EngineMetrics) -> ProcessEngine:
        """Return the engine of the ``model``-th model."""
        waiting = WaitingWork.open(self.folder / f"{model}.waiting", self.worker, self.config.processes.api_workers)
        connectors = connectors_of(self.config, self.folder, model)
        engine = ProcessEngine(connectors, metrics, self.config.scheduling, waiting, zone=self.config.hosts.zone)
        if self.hosts is not None:
            self.hosts.engines[name] = engine
        self._engines.append(engine)
        return engine

    async def run(self, offload: Offload, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Run the engine processes and the links to hosts, forever; ``started`` once the processes' sockets listen.

        Raises ``ModelLoadError`` or ``EngineDeadError``. Cancellation: at once; the processes exit, or are killed.
        """
        if self.hosts is not None:
            try:
                await offload.run("load", self.hosts.read)
            except (OSError, ValueError) as error:
                raise ModelLoadError(str(error)) from error
        async with trio.open_nursery() as nursery:
            if self.processes is not None:
                await nursery.start(self.processes.run)
            if self.hosts is not None:
                nursery.start_soon(self.hosts.run)
            least, most = self.config.processes.replica_range or (1, 1)
            if least < most:
                nursery.start_soon(self._share_queue_seconds)
            task_status.started()

    async def _share_queue_seconds(self) -> None:
        """Tell the process that adds and drains replicas how long the queues are here, forever."""
        workers = self.config.processes.api_workers
        shared = [QueueSeconds.open(seconds_path(self.folder, model), workers) for model in range(len(self._engines))]
        while True:
            for seconds, engine in zip(shared, self._engines, strict=True):
                seconds.write(self.worker, engine.statistics().waiting_s)
            await trio.sleep(SCALING_S)

    async def reload(self, offload: Offload) -> None:
        """Read the hosts and their key again. Cancellation: at once; what was not read is as before."""
        if self.hosts is None:
            return
        try:
            await offload.run("load", self.hosts.read)
        except (OSError, ValueError) as error:
            logger.error("the hosts stay as they are: %s", error)  # noqa: TRY400  (the message says it all)
        self.hosts.look_again()

    def snapshots(self) -> list[Snapshot]:
        """Return the metrics of the engine processes and links that this process runs."""
        processes = [] if self.processes is None else [self.processes.snapshot()]
        return processes + ([] if self.hosts is None else [Snapshot(self.hosts.families(), {})])
