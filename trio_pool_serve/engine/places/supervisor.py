"""The places of a server's engine processes; their supervisor, which keeps them alive; and the messages to them."""

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeAlias

import msgspec
import trio
from attrs import define, evolve, field

from trio_pool_serve.config import Config, encode_config
from trio_pool_serve.engine.gpus import Gpu, sharing_by_mps
from trio_pool_serve.engine.process_placement import has_gpu, replicas_of
from trio_pool_serve.errors import EngineDeadError, ModelLoadError
from trio_pool_serve.processes.child_process import ChildProcess, LoadFailed, RestartBackoff, open_child
from trio_pool_serve.processes.socket_folder import open_with_shared_lock, shared_array
from trio_pool_serve.telemetry.snapshots import Snapshot, engine_process_name, gauge_family
from trio_pool_serve.telemetry.start_display import report_phase, report_step

logger = logging.getLogger(__name__)

MODULE = "trio_pool_serve.server.engine_process"


PlaceState: TypeAlias = Literal["loading", "ready", "failed"]
"""The states that ``/load`` reports. loading: the engine process is starting or draining, or will be restarted soon.
ready: it computes. failed: the model could not be loaded, or the process kept dying; the place is tried again after
minutes."""


class Replica(msgspec.Struct, array_like=True):
    """The replica of an engine process: its number, from 0, within its model and among all engine processes."""

    model: str
    device: str
    """The label of the device in logs and metrics."""
    number: int
    replicas: int
    process: int
    processes: int

    @property
    def labels(self) -> dict[str, str]:
        """The labels that distinguish it from other replicas of its model in ``/metrics``."""
        return {"replica": str(self.number), "device": self.device}

    @property
    def name(self) -> str:
        """The model's name, with the number of the replica if there are several."""
        return f"{self.model}, replica {self.number}" if self.replicas > 1 else self.model


class EngineJob(msgspec.Struct, tag=True, array_like=True):
    """The job of an engine process: load a model with ``loader`` (``module:function``), and listen at ``address``.

    The address is the path of a Unix socket; with a ``key``, it is a host, and the process listens at a free TCP port.
    ``socket_folder`` contains the sockets of the server's processes; with a ``key``, snapshots are sent to the parent.
    If ``cores`` is set, engine processes share the machine's cores through this file. ``memory`` is an open file that
    the process inherits: processes on one GPU divide its memory through it. ``sharers`` is the number of processes that
    have not taken their part of it yet: this one, and others on the GPU that were never ready.
    """

    config: bytes
    replica: Replica
    loader: str
    address: str = ""
    socket_folder: str = ""
    cores: str = ""
    memory: int | None = None
    sharers: int = 1
    key: str = ""


class Leave(msgspec.Struct, tag=True, array_like=True):
    """Message to an engine process that Ray has placed: drain and exit."""


class LoadingStep(msgspec.Struct, tag=True, array_like=True):
    """The present step of an engine process that loads the model, to be displayed."""

    text: str


class Loaded(msgspec.Struct, tag=True, array_like=True):
    """The model is loaded: its ``RunnerFacts`` as text, and the address at which the process listens."""

    description: str
    address: str
    pid: int


class Alive(msgspec.Struct, tag=True, array_like=True):
    """The event loop of the process turns; sent again and again after ``Loaded``."""


ToEngineProcess: TypeAlias = EngineJob | Leave

EngineStatus: TypeAlias = LoadingStep | Loaded | Alive | LoadFailed | Snapshot


MAX_RESTARTS = 10
"""Maximum restarts in a row of an engine process that dies before it is stable. With the pauses they take about three
minutes, in which a missing resource may return."""

RETRY_FAILED_S = 300.0
"""Pause before a failed place is tried again: its problem may have been fixed."""


@define(eq=False)
class Place:
    """The place of one replica of a model: its address, its GPU, and the history of its engine processes."""

    replica: Replica
    path: Path
    """Path of the socket, or of the file with the address."""
    gpu: Gpu | None
    is_wanted: bool = True
    """Whether there should be a process."""
    state: PlaceState = field(default="loading", init=False)
    description: str = field(default="", init=False)
    """How the latest process that has loaded the model computes it; empty if none has."""
    starts: int = field(default=0, init=False)
    ready_at: float = field(default=math.inf, init=False)
    """When the latest process became ready."""

    def become_ready(self, description: str) -> None:
        """Record that the process has loaded the model."""
        self.state, self.description, self.ready_at = "ready", description, trio.current_time()

    @property
    def restarts(self) -> int:
        """Number of processes that were started to replace one that had ended."""
        return max(0, self.starts - 1)

    def __str__(self) -> str:
        return self.replica.name if self.gpu is None else f"{self.replica.name} on {self.gpu.label}"


def paths_of(config: Config, folder: Path, model: int) -> list[Path]:
    """Return the paths of a model's places: of sockets, or of files with addresses."""
    replicas = 0 if config.processes.engine == "hosts" else replicas_of(config)
    return [folder / f"{model}-{replica}.engine" for replica in range(replicas)]


@define(eq=False)
class Supervisor(ABC):
    """Starts an engine process at each place of all models, and another when it ends."""

    config: Config
    loader: str
    socket_folder: Path
    places: list[Place] = field(init=False, factory=list)
    """The places of all models, in the order of the settings."""
    _scaled: trio.lowlevel.ParkingLot = field(init=False, factory=trio.lowlevel.ParkingLot)
    """Unparked whenever ``is_wanted`` of any place changes."""

    def __attrs_post_init__(self) -> None:
        paths = [paths_of(self.config, self.socket_folder, model) for model in range(len(self.config.sources))]
        processes = sum(map(len, paths))
        least, _ = self.config.processes.replica_range or (processes, processes)
        for source, of_model in zip(self.config.sources, paths, strict=True):
            for number, path in enumerate(of_model):
                process = len(self.places)
                gpu, device = self._device_of(process)
                replica = Replica(source.name, device, number, len(of_model), process, processes)
                self.places.append(Place(replica, path, gpu, is_wanted=number < least))

    @abstractmethod
    def _device_of(self, process: int) -> tuple[Gpu | None, str]:
        """Return the GPU assigned to the ``process``-th engine process, if any, and the label of its device."""

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Start the processes, and restart any that die, forever; ``started`` once API processes may be started.

        A place has failed if the model cannot be loaded there at its first start, or after ``MAX_RESTARTS`` restarts in
        a row; it is tried again every ``RETRY_FAILED_S``. Raises ``ModelLoadError`` or ``EngineDeadError`` once all
        places of a model have failed, unless hosts may compute it. Cancellation: the processes exit, or are killed.
        """
        async with trio.open_nursery() as nursery:
            for place in self.places:
                nursery.start_soon(self._keep_alive, place)
            task_status.started()

    async def _keep_alive(self, place: Place) -> NoReturn:
        """Run one process after another, with a pause after each that ended by itself."""
        backoff = RestartBackoff()
        while True:
            await self._wait_wanted(place, is_wanted=True)
            place.state, place.ready_at = "loading", math.inf
            place.starts += 1
            how, failure = await self._live(place)
            if failure and not place.description:
                await self._fail(place, ModelLoadError(failure))
            elif how:
                ended = f"engine process of {place} {how}" + (f": {failure}" if failure else "")
                pause_s = backoff.next_pause_s(max(0.0, trio.current_time() - place.ready_at))
                if backoff.crashes_in_a_row > MAX_RESTARTS:
                    message = f"The {ended}. It was restarted {MAX_RESTARTS} times in a row: giving up."
                    await self._fail(place, EngineDeadError(message))
                else:
                    place.state = "loading"
                    logger.error("the %s; the next one starts in %g s", ended, pause_s)
                    await trio.sleep(pause_s)

    @abstractmethod
    async def _live(self, place: Place) -> tuple[str, str]:
        """Run one process; return how it ended (empty if it was drained), and why it could not load the model.

        The second is empty if the model was loaded. Cancellation: the process is ended.
        """

    async def _wait_wanted(self, place: Place, *, is_wanted: bool) -> None:
        while place.is_wanted is not is_wanted:
            await self._scaled.park()

    async def _fail(self, failed: Place, error: ModelLoadError | EngineDeadError) -> None:
        """Let a place rest, and raise the error if it is the last of its model, unless hosts may compute the model.

        Cancellation: at once.
        """
        failed.state = "failed"
        of_model = [each for each in self.places if each.replica.model == failed.replica.model and each.is_wanted]
        left = [each for each in of_model if each.state != "failed"]
        if not left and not self.config.hosts.engine_hosts:
            if isinstance(error, ModelLoadError):
                raise ModelLoadError.of_model(failed.replica.model, error) from error
            raise error
        others = f"{len(left)} of {len(of_model)} replicas" + ("" if left else " and --engine-hosts")
        logger.error("%s failed, leaving %s; the next attempt is in %g s: %s", failed, others, RETRY_FAILED_S, error)
        await self._leave(failed)
        await trio.sleep(RETRY_FAILED_S)

    async def _leave(self, place: Place) -> None:  # noqa: B027  (most have nothing)
        """Release the resources of a failed place. Cancellation: at once."""

    def _job_of(self, place: Place, device: str, **where: Any) -> EngineJob:
        """Return the job of an engine process that computes on a torch device; ``where`` are its other fields."""
        config = evolve(self.config, loading=evolve(self.config.loading, device=device))
        return EngineJob(encode_config(config), place.replica, self.loader, **where)

    @property
    def descriptions(self) -> dict[str, str]:
        """How each model is computed, by the first of its processes that is ready."""
        return {place.replica.model: place.description for place in reversed(self.places) if place.description}

    def snapshot(self) -> Snapshot:
        """Return the states of the places, for ``/load`` and ``/metrics``."""
        load, processes, samples = dict[str, Any](), dict[str, Any](), list[tuple[dict[str, str], float]]()
        for place in self.places:
            if place.is_wanted:
                replica, state = place.replica, {"state": place.state, "restarts": place.restarts}
                of_model = load.setdefault(replica.model, {"replicas": {}})
                of_model["replicas"][str(replica.number)] = {"device": replica.device, **state}
                processes[engine_process_name(replica.model, str(replica.number))] = state
                values = {"failed": place.state == "failed", "restarts": place.restarts}
                samples += [({"model": replica.model, "of": of, **replica.labels}, values[of]) for of in values]
        return Snapshot([gauge_family("replica", samples)], {"models": load, "processes": processes})


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
            logger.info(sharing_by_mps())
        await super().run(task_status=task_status)

    async def _live(self, place: Place) -> tuple[str, str]:
        folder, device = self.socket_folder, self.config.loading.device
        if place.gpu is not None and (len(self.gpus) > 1 or device != "auto"):
            device = "cuda:0"  # not for a single GPU: if torch cannot use it, ``--device auto`` means the CPU
        job = self._job_of(place, device, address=str(place.path), socket_folder=str(folder))
        on_device = [each for each in self.places if each.gpu == place.gpu]
        environment = {} if place.gpu is None else place.gpu.environment
        with ExitStack() as inherited:
            if len(on_device) > 1 and has_gpu(self.config.loading):
                with suppress(OSError):  # the folder may have been removed
                    path = folder / f"{on_device[0].replica.process}.memory"
                    job.memory = inherited.enter_context(open_with_shared_lock(path)).fileno()
                job.sharers = 1 + sum(not each.description for each in on_device if each is not place)
            elif len(on_device) > 1:
                job.cores = str(folder / CORES)
            fds = [] if job.memory is None else [job.memory]
            async with open_child(MODULE, job, EngineStatus, fds=fds, environment=environment) as child:
                failure = await self._follow(child, place)
        # A process that has ended does not compute: its share of the cores goes to others, since its successor may not
        # start soon.
        with suppress(OSError):  # the folder may have been removed
            if job.cores:
                shared_array(Path(job.cores), place.replica.processes)[place.replica.process] = -math.inf
        # A signal says nothing about the model: the system may briefly have been out of memory.
        was_killed = child.process.returncode is not None and child.process.returncode < 0
        unknown = "" if place.description or was_killed else f"The engine process of {place} {child.end}."
        return child.end, failure or unknown

    async def _follow(self, child: ChildProcess[EngineStatus], place: Place) -> str:
        """Note what a process reports until it ends; return why it could not load the model, or an empty text.

        Cancellation: at once.
        """
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
        return failure
