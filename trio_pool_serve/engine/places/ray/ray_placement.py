"""The process that talks to Ray, and what it and the server say to each other.

Ray's core ends the process that it is in when the cluster's head has not answered for a minute. That must not be the
server: its clients would lose their connections, and engines that still compute their rows.
"""

import logging
from pathlib import Path
from secrets import token_hex
from typing import TypeAlias

import msgspec
import trio
from attrs import define, field

from trio_pool_serve.config import encode_config
from trio_pool_serve.engine.places.engine_job import LoadFailed
from trio_pool_serve.engine.places.supervisor import Supervisor
from trio_pool_serve.errors import ModelLoadError
from trio_pool_serve.processes.child_process import ChildEnd, keep_alive, open_child
from trio_pool_serve.telemetry.snapshots import Snapshot

logger = logging.getLogger(__name__)

MODULE = "trio_pool_serve.server.ray_process"


class RayJob(msgspec.Struct, tag=True, array_like=True):
    """The job: place engine processes that load models with ``loader``; API processes have the same ``key``.

    What they look at is in ``socket_folder``: the addresses of engine processes, and how long the queues are.
    """

    config: bytes
    loader: str
    socket_folder: str
    key: str


class Connected(msgspec.Struct, tag=True, array_like=True):
    """The cluster has been reached; from now on the process tells the states of the places in ``socket_folder``."""


RayStatus: TypeAlias = Connected | LoadFailed
"""``LoadFailed``: the cluster cannot be reached, or, after ``Connected``, all places of a model have failed."""


def key_path(socket_folder: Path) -> Path:
    """Return the path of the key for engine processes that Ray places."""
    return socket_folder / "key"


@define(eq=False)
class RayPlacement(Supervisor):
    """Keeps a process alive whose ``ActorPlaces`` are those of all models.

    When it dies, Ray ends its actors, and so the engine processes; the next one places all of them again.
    """

    key: str = field(factory=lambda: token_hex(32), init=False)
    """For the links to engine processes; the API processes of this server read it in the folder of the sockets."""
    _is_connected: bool = field(default=False, init=False)
    _has_connected: bool = field(default=False, init=False)

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        key_path(self.socket_folder).write_text(self.key)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Keep the process alive, forever; ``started`` at once.

        Raises ``ModelLoadError`` if the cluster cannot be reached at first, or once all places of a model have failed.
        Later the cluster is tried again and again. Cancellation: the process ends the actors and exits, or is killed.
        """
        task_status.started()
        await keep_alive("the placement by Ray", self._live)

    async def _live(self) -> ChildEnd:
        job = RayJob(encode_config(self.config), self.loader, str(self.socket_folder), self.key)
        began, failure = trio.current_time(), ""
        try:
            async with open_child(MODULE, job, RayStatus) as child:
                while (status := await child.status()) is not None:
                    if isinstance(status, LoadFailed):
                        failure = status.message
                    else:
                        began, self._is_connected = trio.current_time(), True
                end = await child.wait()
        finally:
            was_connected, self._is_connected = self._is_connected, False
            for place in self.places:
                place.path.unlink(missing_ok=True)  # the engine process there ends, too
        if failure and (was_connected or not self._has_connected):
            raise ModelLoadError(failure)
        self._has_connected |= was_connected
        if failure:
            logger.error("%s", failure)
        return ChildEnd(end, trio.current_time() - began if was_connected else 0.0)

    def snapshot(self) -> Snapshot:
        """Return that all places are starting while there is no process that tells their states."""
        return Snapshot([], {}) if self._is_connected else super().snapshot()
