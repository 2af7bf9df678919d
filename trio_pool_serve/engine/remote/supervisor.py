"""What keeps replicas alive, wherever their engine processes run."""

import logging
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, NoReturn

import trio
from attrs import define, field

from trio_pool_serve.config import Config
from trio_pool_serve.engine.gpus import Gpu
from trio_pool_serve.engine.placement import replicas_of
from trio_pool_serve.engine.remote.connectors import Connector, FileConnector, UnixConnector
from trio_pool_serve.engine.remote.keys import LinkKeys
from trio_pool_serve.engine.remote.replica import Replica, ReplicaNumbers
from trio_pool_serve.errors import EngineDeadError, ModelLoadError
from trio_pool_serve.processes.child_process import ChildEnd, keep_alive, restart_backoff
from trio_pool_serve.telemetry.gauges import GAUGES
from trio_pool_serve.telemetry.metrics import PREFIX
from trio_pool_serve.telemetry.process_usage import engine_process_name
from trio_pool_serve.telemetry.snapshots import Family, Snapshot

logger = logging.getLogger(__name__)

MAX_RESTARTS = 10
"""In a row, of an engine process that dies within a minute of being ready: with the pauses between them they take about
three minutes, in which what it needs may come back."""

RETRY_FAILED_S = 300.0
"""Pause before a replica that has failed is started again: what it needs may have been repaired."""


def socket_paths(config: Config, socket_folder: Path, model: int) -> list[Path]:
    """Return the paths of the replicas of a model, of their sockets or of files with their addresses."""
    if config.processes.engine == "hosts":
        return []
    return [socket_folder / f"{model}-{replica}.engine" for replica in range(replicas_of(config))]


def key_path(socket_folder: Path) -> Path:
    """Return the path of the key for engine processes that Ray places."""
    return socket_folder / "key"


def connectors_of(config: Config, socket_folder: Path, model: int) -> list[Connector]:
    """Return what connects to the replicas of the ``model``-th model."""
    paths = socket_paths(config, socket_folder, model)
    if config.processes.engine != "ray":
        return [UnixConnector(path) for path in paths]
    keys = LinkKeys(key_path(socket_folder))
    keys.read()
    return [FileConnector(path, keys) for path in paths]


@define(eq=False)
class Supervisor(ABC):
    """Starts an engine process for each replica of all models, and another when it ends."""

    config: Config
    loader: str
    socket_folder: Path
    retry_failed_s: float = field(default=RETRY_FAILED_S, kw_only=True)
    replicas: list[Replica] = field(init=False, factory=list)
    """Those of all models, in the order of the settings."""

    def __attrs_post_init__(self) -> None:
        paths = [socket_paths(self.config, self.socket_folder, model) for model in range(len(self.config.sources))]
        processes = sum(map(len, paths))
        least, _ = self.config.processes.replica_range or (processes, processes)
        for source, of_model in zip(self.config.sources, paths, strict=True):
            for number, path in enumerate(of_model):
                process = len(self.replicas)
                numbers = ReplicaNumbers(number, len(of_model), process, processes)
                self.replicas.append(Replica(source.name, path, numbers, *self._device_of(process)))
                self.replicas[-1].is_wanted = number < least

    def _device_of(self, process: int) -> tuple[Gpu | None, str]:  # noqa: ARG002  (of others each has its own)
        """Return the GPU that the ``process``-th engine process is given here, if any, and the label of its device.

        Ray gives it one, which is then the only one that it sees.
        """
        device = self.config.loading.device
        if device != "auto":
            return None, device
        return None, "cuda:0" if self.config.ray.gpus_per_replica else "cpu"

    @abstractmethod
    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Start the processes, and restart those that die, forever; ``started`` once API processes may be started.

        A replica has failed if it fails to load its model at its first start, or once it has been restarted
        ``MAX_RESTARTS`` times in a row. It is tried again every ``retry_failed_s`` seconds. Raises its
        ``ModelLoadError`` or ``EngineDeadError`` once all replicas of its model have failed. Cancellation: the
        processes exit, and are killed if they do not.
        """

    async def _keep_alive(self, replica: Replica, live: Callable[[], Awaitable[ChildEnd]]) -> NoReturn:
        backoff = restart_backoff()
        while True:
            try:
                await keep_alive(f"the engine of {replica}", live, max_restarts=MAX_RESTARTS, backoff=backoff)
            except (ModelLoadError, EngineDeadError) as error:
                replica.state = "failed"
                of_model = [each for each in self.replicas if each.model == replica.model and each.is_wanted]
                left = [each for each in of_model if each.state != "failed"]
                if not left:
                    if isinstance(error, ModelLoadError):
                        raise ModelLoadError.of_model(replica.model, error) from error
                    raise
                logger.error(  # noqa: TRY400  (the message says it all)
                    "%s has failed, %d of %d replicas are left; the next attempt is in %g s: %s",
                    replica,
                    len(left),
                    len(of_model),
                    self.retry_failed_s,
                    error,
                )
            await self._rest(replica)

    async def _rest(self, replica: Replica) -> None:  # noqa: ARG002  (of others a failed replica leaves something)
        """Wait until a replica that has failed is tried again. Cancellation: at once."""
        await trio.sleep(self.retry_failed_s)

    def snapshot(self) -> Snapshot:
        """Return the states of the replicas, for ``/load`` and ``/metrics``."""
        name, load, processes = f"{PREFIX}replica", dict[str, Any](), dict[str, Any]()
        gauges = Family(name, GAUGES["replica"].text, "gauge", [])
        for replica in self.replicas:
            if not replica.is_wanted:
                continue
            replicas = load.setdefault(replica.model, {"replicas": {}})["replicas"]
            replicas[replica.labels["replica"]] = {
                "device": replica.device,
                "state": replica.state,
                "restarts": replica.restarts,
            }
            process = engine_process_name(replica.model, replica.labels["replica"])
            processes[process] = {"state": replica.state, "restarts": replica.restarts}
            for of, value in (("failed", replica.state == "failed"), ("restarts", replica.restarts)):
                gauges.samples.append((name, {"model": replica.model, "of": of, **replica.labels}, float(value)))
        return Snapshot([gauges], {"models": load, "processes": processes})
