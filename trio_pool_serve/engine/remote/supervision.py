"""Starts the engine processes, and restarts those that die."""

import itertools
import logging
import math
from pathlib import Path
from typing import NoReturn, TypeAlias

import msgspec
import trio
from attrs import define

from trio_pool_serve.config import Config, ModelSource, encode_config
from trio_pool_serve.engine.placement import has_gpu, replicas_of
from trio_pool_serve.errors import ModelLoadError
from trio_pool_serve.processes.child_process import ChildEnd, keep_alive, listening_at, open_child

logger = logging.getLogger(__name__)

MODULE = "trio_pool_serve.server.engine_process"


class ReplicaNumbers(msgspec.Struct, array_like=True):
    """The number, from 0, of an engine process among its model's ``replicas`` and among all engine ``processes``."""

    replica: int
    replicas: int
    process: int
    processes: int


class EngineJob(msgspec.Struct, tag=True, array_like=True):
    """The job of an engine process: load a model with ``loader`` (``module:function``), and listen on ``fd``.

    The model's replicas count small requests in the file ``small_requests``; all engine processes share the machine's
    cores through the file ``cores``, if it is not empty. ``socket_folder`` has the sockets of the server's processes.
    """

    config: bytes
    model: str
    loader: str
    socket_folder: str
    fd: int
    numbers: ReplicaNumbers
    small_requests: str
    cores: str


class Loaded(msgspec.Struct, tag=True, array_like=True):
    """The model is loaded: ``Runner.describe()``."""

    description: str


class LoadFailed(msgspec.Struct, tag=True, array_like=True):
    """The model cannot be loaded: the message for the user."""

    message: str


EngineStatus: TypeAlias = Loaded | LoadFailed


def socket_paths(config: Config, socket_folder: Path, model: int) -> list[Path]:
    """Return the socket paths of the replicas of the ``model``-th model."""
    return [socket_folder / f"{model}-{replica}.engine" for replica in range(replicas_of(config))]


@define(eq=False)
class EngineProcesses:
    """The engine processes of all models of a server.

    Their listening sockets are bound here, in a private folder, and outlive them: a process that connects while an
    engine process is being started waits for it.
    """

    config: Config
    loader: str
    socket_folder: Path

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Start the processes, and restart those that die, forever; ``started`` once all their sockets listen.

        Raises ``ModelLoadError`` if one fails to load its model at its first start, and ``EngineDeadError`` if one has
        been restarted ``--max-engine-restarts`` times in a row. Cancellation: their channels are
        closed, which makes them exit, and they are killed if they do not.
        """
        async with trio.open_nursery() as nursery:
            paths = [socket_paths(self.config, self.socket_folder, model) for model in range(len(self.config.sources))]
            processes, process = sum(map(len, paths)), itertools.count()
            for source, of_model in zip(self.config.sources, paths, strict=True):
                for replica, path in enumerate(of_model):
                    numbers = ReplicaNumbers(replica, len(of_model), next(process), processes)
                    await nursery.start(self._keep_alive, source, path, numbers)
            task_status.started()

    async def _keep_alive(
        self, source: ModelSource, path: Path, numbers: ReplicaNumbers, *, task_status: trio.TaskStatus[None]
    ) -> NoReturn:
        name = f"{source.name}, replica {numbers.replica}" if numbers.replicas > 1 else source.name
        with listening_at(path) as listening:
            task_status.started()
            job = EngineJob(
                encode_config(self.config),
                source.name,
                self.loader,
                str(self.socket_folder),
                listening.fileno(),
                numbers,
                str(path.with_name(path.stem.rpartition("-")[0] + ".small_requests")),
                "" if numbers.processes == 1 or has_gpu(self.config.loading) else str(self.socket_folder / "cores"),
            )
            has_loaded = False

            async def live() -> ChildEnd:
                nonlocal has_loaded
                ready_at = math.inf
                async with open_child(MODULE, job, EngineStatus, fds=[listening.fileno()]) as child:
                    status = await child.status()
                    if isinstance(status, Loaded):
                        logger.info("engine process %d is ready: %s: %s", child.process.pid, name, status.description)
                        has_loaded, ready_at = True, trio.current_time()
                    end = await child.wait()
                failure = (
                    status.message if isinstance(status, LoadFailed) else f"The engine process of {name} has {end}."
                )
                if not has_loaded:
                    raise ModelLoadError(failure)
                logger.error("%s", failure)
                return ChildEnd(end, max(0.0, trio.current_time() - ready_at))

            restarts = self.config.processes.max_engine_restarts
            await keep_alive(f"the engine of {name}", live, max_restarts=restarts)
