"""The places on this machine: an engine process of this process's for each."""

import logging
import math
from collections.abc import Sequence
from contextlib import suppress

import trio
from attrs import define

from trio_pool_serve.engine.gpus import Gpu, mps_directory
from trio_pool_serve.engine.placement import has_gpu
from trio_pool_serve.engine.places.place import MODULE, EngineStatus, Loaded, LoadFailed, Place
from trio_pool_serve.engine.places.supervisor import Supervisor
from trio_pool_serve.processes.child_process import open_child
from trio_pool_serve.processes.shared_array import shared_array

logger = logging.getLogger(__name__)

CORES = "cores"
"""The file by which engine processes share the cores; it has the time at which each last computed."""


@define(eq=False)
class LocalPlaces(Supervisor):
    """The engine processes of all models on this machine, each behind a Unix socket in a private folder.

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
        """As ``Supervisor.run``; ``started`` at once. Cancellation: as there."""
        self._log_placement()
        await super().run(task_status=task_status)

    def _log_placement(self) -> None:
        for gpu in self.gpus:
            names = [place.replica.name for place in self.places if place.gpu == gpu]
            if names:
                logger.info("%s: %s", gpu, "; ".join(names))
        if 0 < len(self.gpus) < len(self.places):
            directory = mps_directory()
            if directory is None:
                logger.info("replicas take turns on each GPU: there is no MPS control daemon")
            else:
                logger.info("replicas compute concurrently on each GPU, by the MPS control daemon at %s", directory)

    async def _live(self, place: Place) -> tuple[str, str]:
        folder, device = self.socket_folder, self.config.loading.device
        if place.gpu is not None and (len(self.gpus) > 1 or device != "auto"):
            device = "cuda:0"  # else a single GPU that torch cannot use leaves the CPU to ``--device auto``
        shares_cores = place.replica.processes > 1 and not has_gpu(self.config.loading)
        cores = str(folder / CORES) if shares_cores else ""
        job = self._job_of(place, device, address=str(place.path), socket_folder=str(folder), cores=cores)
        environment = {} if place.gpu is None else place.gpu.environment
        async with open_child(MODULE, job, EngineStatus, environment=environment) as child:
            status = await child.status()
            if isinstance(status, Loaded):
                logger.info("engine process %d is ready: %s: %s", status.pid, place, status.description)
                place.become_ready()
            end = await child.wait()
        self._release_cores(place)
        if isinstance(status, LoadFailed):
            return end, status.message
        # A signal says nothing of the model: the system may have had no memory left for a moment.
        was_killed = child.process.returncode is not None and child.process.returncode < 0
        return end, "" if place.has_loaded or was_killed else f"The engine process of {place} has {end}."

    def _release_cores(self, place: Place) -> None:
        """Record that a process which has ended does not compute: others leave its share of the cores to one that does.

        Its successor may not come for long.
        """
        with suppress(OSError):  # the folder may have been removed
            cores = shared_array(self.socket_folder / CORES, place.replica.processes)
            cores[place.replica.process] = -math.inf
