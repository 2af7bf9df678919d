"""The process that talks to Ray, and what it and the server say to each other.

Ray's core ends the process that it is in when the cluster's head has not answered for a minute. That must not be the
server: its clients would lose their connections, and engines that still compute their rows.
"""

import logging
import math
from pathlib import Path
from typing import TypeAlias

import msgspec
import trio
from attrs import define, field

from trio_pool_serve.config import encode_config
from trio_pool_serve.engine.places.engine_job import LoadFailed
from trio_pool_serve.engine.places.ray.actor_places import ActorPlaces
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
class RayPlacement:
    """Keeps a process alive in which the places of ``actors`` are kept, and tells their states while there is none.

    When it dies, Ray ends its actors, and so the engine processes; the next one places all of them again.
    """

    actors: ActorPlaces
    _is_connected: bool = field(default=False, init=False)
    _has_connected: bool = field(default=False, init=False)

    def __attrs_post_init__(self) -> None:
        key_path(self.actors.socket_folder).write_text(self.actors.key)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Keep the process alive, forever; ``started`` at once.

        Raises ``ModelLoadError`` if the cluster cannot be reached at first, or once all places of a model have failed.
        Later the cluster is tried again and again. Cancellation: the process ends the actors and exits, or is killed.
        """
        task_status.started()
        await keep_alive("the placement by Ray", self._live)

    async def _live(self) -> ChildEnd:
        actors, connected_at = self.actors, math.inf
        job = RayJob(encode_config(actors.config), actors.loader, str(actors.socket_folder), actors.key)
        try:
            async with open_child(MODULE, job, RayStatus) as child:
                while (status := await child.status()) is not None:
                    if isinstance(status, Connected):
                        connected_at = trio.current_time()
                        self._is_connected = self._has_connected = True
                    elif self._is_connected or not self._has_connected:
                        raise ModelLoadError(status.message)
                    else:
                        logger.error("%s", status.message)
                end = await child.wait()
        finally:
            self._is_connected = False
            for place in actors.places:
                place.path.unlink(missing_ok=True)  # the engine process there ends, too
        return ChildEnd(end, max(0.0, trio.current_time() - connected_at))

    def snapshot(self) -> Snapshot:
        """Return that all places are loading while there is no process that tells their states."""
        return Snapshot([], {}) if self._is_connected else self.actors.snapshot()
