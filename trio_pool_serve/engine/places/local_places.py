"""The places on this machine: each has an engine process that is a child of this process."""

import logging
import math
from collections.abc import Sequence
from contextlib import suppress

import trio
from attrs import define

from trio_pool_serve.engine.gpus import Gpu, mps_directory
from trio_pool_serve.engine.places.supervisor import MODULE, EngineStatus, Loaded, LoadingStep, Place, Supervisor
from trio_pool_serve.engine.process_placement import has_gpu
from trio_pool_serve.processes.child_process import LoadFailed, open_child
from trio_pool_serve.processes.socket_folder import shared_array
from trio_pool_serve.telemetry.start_display import report_phase, report_step

logger = logging.getLogger(__name__)

CORES = "cores"
"""The file through which engine processes share the cores; it contains the time at which each last computed."""


@define(eq=False)
class LocalPlaces(Supervisor):
    """The engine processes of all models on this machine, each at a Unix socket in a private folder.

    They are spread over the ``gpus`` in turn: with fewer replicas than GPUs, the next model begins at the next GPU.
    Each process sees only its own GPU. Without ``gpus``, all have this process's environment and the configured device.
    """

    gpus: Sequence[Gpu] = ()

    def _device_of(self, process: int) -> tuple[Gpu | None, str]:
        if self.gpus:
            gpu = self.gpus[process % len(self.gpus)]
            return gpu, gpu.label
        return None, self.config.loading.device if has_gpu(self.config.loading) else "cpu"

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Log the replicas of each GPU, then run as ``Supervisor.run``; ``started`` at once.

        Cancellation: the processes exit, or are killed.
        """
        for gpu in self.gpus[: len(self.places)]:
            names = [place.replica.name for place in self.places if place.gpu == gpu]
            logger.info("%s: %s", gpu, "; ".join(names))
        if 0 < len(self.gpus) < len(self.places):
            daemon = mps_directory()
            turns = "take turns: no MPS control daemon is running"
            how = f"compute concurrently, by the MPS control daemon at {daemon}" if daemon else turns
            logger.info("replicas on the same GPU %s", how)
        await super().run(task_status=task_status)

    async def _live(self, place: Place) -> tuple[str, str]:
        folder, device = self.socket_folder, self.config.loading.device
        if place.gpu is not None and (len(self.gpus) > 1 or device != "auto"):
            device = "cuda:0"  # not for a single GPU: if torch cannot use it, ``--device auto`` means the CPU
        cores = str(folder / CORES) if place.replica.processes > 1 and not has_gpu(self.config.loading) else ""
        job = self._job_of(place, device, address=str(place.path), socket_folder=str(folder), cores=cores)
        environment = {} if place.gpu is None else place.gpu.environment
        async with open_child(MODULE, job, EngineStatus, environment=environment) as child:
            report_phase(f"Loading {place}")
            failure, silence_s = "", self.config.scheduling.silence_timeout_s
            while (status := await child.status(silence_s if place.state == "ready" else math.inf)) is not None:
                match status:
                    case LoadingStep(step):
                        report_step(step)
                    case LoadFailed(failure):
                        pass
                    case Loaded():
                        logger.info("engine process %d is ready: %s: %s", status.pid, place, status.description)
                        place.become_ready(status.description)
        # A process that has ended does not compute: its share of the cores goes to others, since its successor may not
        # start soon.
        with suppress(OSError):  # the folder may have been removed
            shared_array(folder / CORES, place.replica.processes)[place.replica.process] = -math.inf
        # A signal says nothing about the model: the system may briefly have been out of memory.
        was_killed = child.process.returncode is not None and child.process.returncode < 0
        unknown = "" if place.description or was_killed else f"The engine process of {place} {child.end}."
        return child.end, failure or unknown
