"""A replica as the process that starts it knows it."""

from pathlib import Path
from typing import Literal, TypeAlias

import msgspec
from attrs import define, field

from trio_pool_serve.engine.gpus import Gpu

ReplicaState: TypeAlias = Literal["loading", "ready", "failed"]
"""loading: its process is being started, or a restart is near. failed: there is no process for a while."""


class ReplicaNumbers(msgspec.Struct, array_like=True):
    """The number, from 0, of an engine process among its model's ``replicas`` and among all engine ``processes``."""

    replica: int
    replicas: int
    process: int
    processes: int


@define(eq=False)
class Replica:
    """One replica of a model: where it listens, the GPU that it computes on, and how its engine process is."""

    model: str
    path: Path
    """Of the socket, or of the file with the address."""
    numbers: ReplicaNumbers
    gpu: Gpu | None
    device: str
    """The label of the device."""
    state: ReplicaState = field(default="loading", init=False)
    has_loaded: bool = field(default=False, init=False)
    """Whether any of its processes has loaded the model."""
    starts: int = field(default=0, init=False)
    is_wanted: bool = field(default=True, init=False)
    """Whether there is to be a process at all."""

    def begin(self) -> None:
        """Record that a process is started."""
        self.state = "loading"
        self.starts += 1

    @property
    def name(self) -> str:
        """The model's name and, with several replicas, the number of this one."""
        return f"{self.model}, replica {self.numbers.replica}" if self.numbers.replicas > 1 else self.model

    @property
    def labels(self) -> dict[str, str]:
        """What tells this replica from others of its model in ``/metrics``."""
        return {"replica": str(self.numbers.replica), "device": self.device}

    @property
    def restarts(self) -> int:
        """How often a process was started in place of one that had ended."""
        return max(0, self.starts - 1)

    def __str__(self) -> str:
        return self.name if self.gpu is None else f"{self.name} on {self.gpu.label}"
