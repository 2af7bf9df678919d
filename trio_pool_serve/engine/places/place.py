"""The place of one replica of a model that this server starts: its address, its state and its history."""

import math
from pathlib import Path
from typing import Literal, TypeAlias

import msgspec
import trio
from attrs import define, field

from trio_pool_serve.config import Config
from trio_pool_serve.engine.gpus import Gpu
from trio_pool_serve.engine.placement import replicas_of

PlaceState: TypeAlias = Literal["loading", "ready", "failed"]
"""As reported by ``/load``. loading: its engine process is starting or draining, or will be restarted soon. ready: it
computes. failed: the model could not be loaded, or the process kept dying; it is tried again after minutes."""


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


@define(eq=False)
class Place:
    """The place of one replica of a model: its address, its GPU, and the history of its engine processes."""

    replica: Replica
    path: Path
    """Path of the socket, or of the file with the address."""
    gpu: Gpu | None
    state: PlaceState = field(default="loading", init=False)
    has_loaded: bool = field(default=False, init=False)
    """Whether any of its processes has loaded the model."""
    description: str = field(default="", init=False)
    """How the latest of them computes it."""
    starts: int = field(default=0, init=False)
    ready_at: float = field(default=math.inf, init=False)
    """When the latest process became ready."""
    is_wanted: bool = field(default=True, init=False)
    """Whether there should be a process."""

    def become_ready(self, description: str) -> None:
        """Record that the process has loaded the model."""
        self.state, self.has_loaded, self.ready_at = "ready", True, trio.current_time()
        self.description = description

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
