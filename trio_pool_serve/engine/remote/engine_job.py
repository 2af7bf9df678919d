"""What an engine process and the process that starts it say to each other."""

from typing import TypeAlias

import msgspec

from trio_pool_serve.engine.remote.replica import ReplicaNumbers
from trio_pool_serve.telemetry.snapshots import Snapshot

MODULE = "trio_pool_serve.server.engine_process"


class EngineJob(msgspec.Struct, tag=True, array_like=True):
    """The job of an engine process: load a model with ``loader`` (``module:function``), and listen on ``fd``.

    The model's replicas count small requests in the file ``small_requests``; all engine processes share the machine's
    cores through the file ``cores``. ``socket_folder`` has the sockets of the server's processes; without one, the
    snapshots are sent to who has started the process. What is empty does not exist. ``device`` is the label of the
    device in logs and metrics.
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
    key: str = ""
    """Of those that connect by TCP, to an engine process that Ray has placed."""


class Leave(msgspec.Struct, tag=True, array_like=True):
    """Message to an engine process that Ray has placed: have no more rows sent, compute those there are, and exit."""


class Loaded(msgspec.Struct, tag=True, array_like=True):
    """The model is loaded: ``Runner.describe()``."""

    description: str


class LoadFailed(msgspec.Struct, tag=True, array_like=True):
    """The model cannot be loaded: the message for the user."""

    message: str


ToEngineProcess: TypeAlias = EngineJob | Leave

EngineStatus: TypeAlias = Loaded | LoadFailed | Snapshot
