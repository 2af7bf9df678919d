"""Starts the engine processes, and restarts those that die."""

import logging
import math
import socket
import struct
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NoReturn

import trio
from attrs import define, evolve

from trio_pool_serve.config import encode_config
from trio_pool_serve.engine.gpus import Gpu
from trio_pool_serve.engine.mps import mps_directory
from trio_pool_serve.engine.placement import has_gpu
from trio_pool_serve.engine.remote.engine_job import MODULE, EngineJob, EngineStatus, Loaded, LoadFailed
from trio_pool_serve.engine.remote.replica import Replica
from trio_pool_serve.engine.remote.supervisor import Supervisor
from trio_pool_serve.errors import ModelLoadError
from trio_pool_serve.processes.child_process import ChildEnd, listening_at, open_child

logger = logging.getLogger(__name__)


@define(eq=False)
class EngineProcesses(Supervisor):
    """The engine processes of all models of a server.

    Their listening sockets are bound here, in a private folder, and outlive them: a process that connects while an
    engine process is being started waits for it.

    They take turns on the ``gpus``: with fewer replicas than GPUs, the next model begins at the next GPU. Each sees its
    own only. Without ``gpus`` all have the environment of this process, and torch the device of the settings.
    """

    gpus: Sequence[Gpu] = ()

    def _device_of(self, process: int) -> tuple[Gpu | None, str]:
        if self.gpus:
            gpu = self.gpus[process % len(self.gpus)]
            return gpu, gpu.label
        return None, self.config.loading.device if has_gpu(self.config.loading) else "cpu"

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Start the processes, and restart those that die, forever; ``started`` once all their sockets listen.

        Raises as ``Supervisor.run``. Cancellation: the processes' channels are closed, which makes them exit, and they
        are killed if they do not.
        """
        self._log_placement()
        async with trio.open_nursery() as nursery:
            for replica in self.replicas:
                await nursery.start(self._listen, replica)
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

    async def _listen(self, replica: Replica, *, task_status: trio.TaskStatus[None]) -> NoReturn:
        with listening_at(replica.path) as listening:
            task_status.started()
            await self._keep_alive(replica, partial(self._live, replica, listening))

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
        )
