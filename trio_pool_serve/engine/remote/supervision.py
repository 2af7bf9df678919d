"""Starts the engine processes, and restarts those that die."""

import logging
import math
import socket
import struct
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from secrets import token_hex
from typing import Any, NoReturn, TypeAlias

import msgspec
import trio
from attrs import define, evolve, field

from trio_pool_serve.config import Config, encode_config
from trio_pool_serve.engine.gpus import Gpu
from trio_pool_serve.engine.mps import mps_directory
from trio_pool_serve.engine.placement import has_gpu, replicas_of
from trio_pool_serve.engine.remote.connectors import Connector, FileConnector, UnixConnector
from trio_pool_serve.engine.remote.keys import LinkKeys
from trio_pool_serve.engine.remote.replica import Replica, ReplicaNumbers
from trio_pool_serve.errors import EngineDeadError, ModelLoadError
from trio_pool_serve.processes.child_process import (
    ChildEnd,
    keep_alive,
    listening_at,
    listening_by_tcp,
    open_child,
    restart_backoff,
)
from trio_pool_serve.telemetry.metrics import PREFIX
from trio_pool_serve.telemetry.snapshots import Family, Snapshot

logger = logging.getLogger(__name__)

MODULE = "trio_pool_serve.server.engine_process"

RETRY_FAILED_S = 300.0
"""Pause before a replica that has failed is started again: what it needs may have been repaired."""


class EngineJob(msgspec.Struct, tag=True, array_like=True):
    """The job of an engine process: load a model with ``loader`` (``module:function``), and listen on ``fd``.

    The model's replicas count small requests in the file ``small_requests``; all engine processes share the machine's
    cores through the file ``cores``, if it is not empty. ``socket_folder`` has the sockets of the server's processes.
    ``device`` is the label of the device in logs and metrics.
    """

    config: bytes
    model: str
    loader: str
    socket_folder: str
    fd: int
    numbers: ReplicaNumbers
    device: str
    small_requests: str
    cores: str
    key_file: str = ""
    """Of those that connect, if the socket listens for TCP."""


class Loaded(msgspec.Struct, tag=True, array_like=True):
    """The model is loaded: ``Runner.describe()``."""

    description: str


class LoadFailed(msgspec.Struct, tag=True, array_like=True):
    """The model cannot be loaded: the message for the user."""

    message: str


EngineStatus: TypeAlias = Loaded | LoadFailed


def socket_paths(config: Config, socket_folder: Path, model: int) -> list[Path]:
    """Return the socket paths of the replicas of the ``model``-th model on this machine."""
    if config.processes.engine == "hosts":
        return []
    return [socket_folder / f"{model}-{replica}.engine" for replica in range(replicas_of(config))]


def key_path(socket_folder: Path) -> Path:
    """Return the path of the key for engine processes of this machine that are connected to by TCP."""
    return socket_folder / "key"


def connectors_of(config: Config, socket_folder: Path, model: int) -> list[Connector]:
    """Return what connects to the replicas of the ``model``-th model."""
    paths = socket_paths(config, socket_folder, model)
    if config.processes.engine_link == "unix":
        return [UnixConnector(path) for path in paths]
    keys = LinkKeys(key_path(socket_folder))
    keys.read()
    return [FileConnector(path, keys, config.hosts.link_timeout_s) for path in paths]


@define(eq=False)
class EngineProcesses:
    """The engine processes of all models of a server.

    Their listening sockets are bound here, in a private folder, and outlive them: a process that connects while an
    engine process is being started waits for it.

    They take turns on the ``gpus``: with fewer replicas than GPUs, the next model begins at the next GPU. Each sees its
    own only. Without ``gpus`` all have the environment of this process, and torch the device of the settings.
    """

    config: Config
    loader: str
    socket_folder: Path
    gpus: Sequence[Gpu] = ()
    retry_failed_s: float = field(default=RETRY_FAILED_S, kw_only=True)
    replicas: list[Replica] = field(init=False)
    """Those of all models, in the order of the settings."""

    def __attrs_post_init__(self) -> None:
        if self.config.processes.engine_link == "tcp":
            key_path(self.socket_folder).write_text(token_hex(32))

    @replicas.default
    def _make_replicas(self) -> list[Replica]:
        paths = [socket_paths(self.config, self.socket_folder, model) for model in range(len(self.config.sources))]
        processes = sum(map(len, paths))
        replicas: list[Replica] = []
        for source, of_model in zip(self.config.sources, paths, strict=True):
            for number, path in enumerate(of_model):
                process = len(replicas)
                gpu = self.gpus[process % len(self.gpus)] if self.gpus else None
                numbers = ReplicaNumbers(number, len(of_model), process, processes)
                replicas.append(Replica(source.name, path, numbers, gpu, self._label_of(gpu)))
        return replicas

    def _label_of(self, gpu: Gpu | None) -> str:
        if gpu is not None:
            return gpu.label
        return self.config.loading.device if has_gpu(self.config.loading) else "cpu"

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Start the processes, and restart those that die, forever; ``started`` once all their sockets listen.

        A replica has failed if it fails to load its model at its first start, or once it has been restarted
        ``--max-engine-restarts`` times in a row. It is tried again every ``retry_failed_s`` seconds. Raises its
        ``ModelLoadError`` or ``EngineDeadError`` once all replicas of its model have failed. Cancellation: the
        processes' channels are closed, which makes them exit, and they are killed if they do not.
        """
        self._log_placement()
        async with trio.open_nursery() as nursery:
            for replica in self.replicas:
                await nursery.start(self._keep_alive, replica)
            task_status.started()

    def _log_placement(self) -> None:
        for gpu in self.gpus:
            names = [replica.name for replica in self.replicas if replica.gpu == gpu]
            if names:
                logger.info("%s: %s", gpu, "; ".join(names))
        if 0 < len(self.gpus) < len(self.replicas):
            directory = mps_directory()
            if directory is None:
                logger.info("replicas take turns on each GPU: there is no MPS control daemon")
            else:
                logger.info("replicas compute concurrently on each GPU, by the MPS control daemon at %s", directory)

    async def _keep_alive(self, replica: Replica, *, task_status: trio.TaskStatus[None]) -> NoReturn:
        backoff = restart_backoff()
        restarts = self.config.processes.max_engine_restarts
        by_tcp = self.config.processes.engine_link == "tcp"
        with (listening_by_tcp if by_tcp else listening_at)(replica.path) as listening:
            task_status.started()
            live = partial(self._live, replica, listening)
            while True:
                try:
                    await keep_alive(f"the engine of {replica}", live, max_restarts=restarts, backoff=backoff)
                except (ModelLoadError, EngineDeadError) as error:
                    replica.state = "failed"
                    of_model = [each for each in self.replicas if each.model == replica.model]
                    left = [each for each in of_model if each.state != "failed"]
                    if not left:
                        raise
                    logger.error(  # noqa: TRY400  (the message says it all)
                        "%s has failed, %d of %d replicas are left; the next attempt is in %g s: %s",
                        replica,
                        len(left),
                        len(of_model),
                        self.retry_failed_s,
                        error,
                    )
                await trio.sleep(self.retry_failed_s)

    async def _live(self, replica: Replica, listening: socket.socket) -> ChildEnd:
        replica.begin()
        ready_at = math.inf
        environment = {} if replica.gpu is None else replica.gpu.environment
        job, fds = self._job_of(replica, listening), [listening.fileno()]
        async with open_child(MODULE, job, EngineStatus, fds=fds, environment=environment) as child:
            status = await child.status()
            if isinstance(status, Loaded):
                logger.info("engine process %d is ready: %s: %s", child.process.pid, replica, status.description)
                replica.state, replica.has_loaded, ready_at = "ready", True, trio.current_time()
            end = await child.wait()
        replica.state = "loading"
        self._release_cores(replica)
        failure = status.message if isinstance(status, LoadFailed) else f"The engine process of {replica} has {end}."
        if not replica.has_loaded:
            raise ModelLoadError(failure)
        logger.error("%s", failure)
        return ChildEnd(end, max(0.0, trio.current_time() - ready_at))

    def _release_cores(self, replica: Replica) -> None:
        """Record that a process which has ended does not compute: others leave its share of the cores to one that does.

        The file has the time at which each last computed, as a float64; its successor may not come for long.
        """
        with suppress(OSError), self._cores.open("r+b") as cores:  # none of them may share cores
            cores.seek(8 * replica.numbers.process)
            cores.write(struct.pack("d", -math.inf))

    @property
    def _cores(self) -> Path:
        return self.socket_folder / "cores"

    def _job_of(self, replica: Replica, listening: socket.socket) -> EngineJob:
        config, path = self.config, replica.path
        if replica.gpu is not None and (len(self.gpus) > 1 or config.loading.device != "auto"):
            # Else a single GPU that torch cannot use leaves the CPU to ``--device auto``.
            config = evolve(config, loading=evolve(config.loading, device="cuda:0"))
        shares_cores = replica.numbers.processes > 1 and not has_gpu(config.loading)
        return EngineJob(
            encode_config(config),
            replica.model,
            self.loader,
            str(self.socket_folder),
            listening.fileno(),
            replica.numbers,
            replica.device,
            str(path.with_name(path.stem.rpartition("-")[0] + ".small_requests")),
            str(self._cores) if shares_cores else "",
            str(key_path(self.socket_folder)) if config.processes.engine_link == "tcp" else "",
        )

    def snapshot(self) -> Snapshot:
        """Return the states of the replicas, for ``/load`` and ``/metrics``."""
        name, load = f"{PREFIX}replica", dict[str, Any]()
        gauges = Family(name, "Replicas", "gauge", [])
        for replica in self.replicas:
            replicas = load.setdefault(replica.model, {"replicas": {}})["replicas"]
            replicas[replica.labels["replica"]] = {
                "device": replica.device,
                "state": replica.state,
                "restarts": replica.restarts,
            }
            for of, value in (("failed", replica.state == "failed"), ("restarts", replica.restarts)):
                gauges.samples.append((name, {"model": replica.model, "of": of, **replica.labels}, float(value)))
        return Snapshot([gauges], {"models": load})
