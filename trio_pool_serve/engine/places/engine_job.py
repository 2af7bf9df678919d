"""What an engine process and the process that starts it say to each other."""

from typing import TypeAlias

import msgspec

from trio_pool_serve.engine.places.place import Replica
from trio_pool_serve.telemetry.snapshots import Snapshot

MODULE = "trio_pool_serve.server.engine_process"


class EngineJob(msgspec.Struct, tag=True, array_like=True):
    """The job of an engine process: load a model with ``loader`` (``module:function``), and listen at ``address``.

    That is the path of a Unix socket; with a ``key`` it is a host, on which the process listens at a free TCP port.
    ``socket_folder`` contains the sockets of the server's processes; without one, snapshots are sent to the parent. All
    engine processes share the machine's cores through the file ``cores``, if there is one.
    """

    config: bytes
    replica: Replica
    loader: str
    address: str = ""
    socket_folder: str = ""
    cores: str = ""
    key: str = ""


class Leave(msgspec.Struct, tag=True, array_like=True):
    """Message to an engine process that Ray has placed: ask for no more rows, compute the rest, and exit."""


class Loaded(msgspec.Struct, tag=True, array_like=True):
    """The model is loaded: ``Runner.describe()``, and the address at which the process listens."""

    description: str
    address: str
    pid: int


class LoadFailed(msgspec.Struct, tag=True, array_like=True):
    """The model cannot be loaded: the message for the user."""

    message: str


ToEngineProcess: TypeAlias = EngineJob | Leave

EngineStatus: TypeAlias = Loaded | LoadFailed | Snapshot
