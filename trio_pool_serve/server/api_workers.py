"""Several API processes on one listening socket; the launcher only supervises them and the engine processes.

They are not hypercorn workers: hypercorn's master ends all workers as soon as the first has drained.
"""

import logging
import math
import socket
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TypeAlias

import msgspec
import trio
from attrs import define, field

from trio_pool_serve.config import Config, encode_config
from trio_pool_serve.engine.gpus import Gpu
from trio_pool_serve.engine.places.ray_places import RayPlacement
from trio_pool_serve.engine.places.server_places import supervisor_of
from trio_pool_serve.engine.places.supervisor import Supervisor
from trio_pool_serve.errors import ModelLoadError
from trio_pool_serve.processes.child_process import (
    ChildEnd,
    ChildProcess,
    LoadFailed,
    keep_alive,
    open_child,
    open_process_nursery,
)
from trio_pool_serve.processes.signals import watch_ends, watch_reloads
from trio_pool_serve.processes.socket_folder import SocketFolder
from trio_pool_serve.server.listening_socket import open_listening, url_of
from trio_pool_serve.server.systemd import STOPPING, feed_watchdog, notify
from trio_pool_serve.telemetry.snapshots import (
    Snapshot,
    api_process_name,
    gather_snapshots,
    merged_load,
    process_usage,
    serve_snapshots,
)

logger = logging.getLogger(__name__)

MODULE = "trio_pool_serve.server.api_process"

DRAIN_MARGIN_S = 2.0
"""Seconds that a process may take to exit after ``--drain-timeout-s``."""


class ApiJob(msgspec.Struct, tag=True, array_like=True):
    """The job of an API process: serve on the listening socket ``fd``, with the engines in ``socket_folder``."""

    config: bytes
    socket_folder: str
    number: int
    """Index of this API process, from 0."""
    fd: int
    joins: bool
    """Whether other API processes serve already: then this one accepts no connection before its models are ready."""


class Drain(msgspec.Struct, tag=True, array_like=True):
    """Message to an API process: finish the running requests, then exit."""


class Reload(msgspec.Struct, tag=True, array_like=True):
    """Message to an API process: reload the files that the settings name."""


class Ready(msgspec.Struct, tag=True, array_like=True):
    """Message of an API process: all models are ready."""


FromParent: TypeAlias = ApiJob | Drain | Reload
ToParent: TypeAlias = Ready | LoadFailed


@define(eq=False)
class ApiWorkers:
    """The API processes; each is replaced when it dies, until they drain."""

    config: Config
    socket_folder: Path
    listening: socket.socket
    ready: trio.Event = field(init=False, factory=trio.Event)
    """Set once one API process is ready."""
    _children: set[ChildProcess[ToParent]] = field(init=False, factory=set)
    starts: Counter[int] = field(init=False, factory=Counter)
    """Number of starts of each API process, by its index."""
    _draining: bool = field(default=False, init=False)
    _drained: trio.Event = field(init=False, factory=trio.Event)

    async def run(self) -> None:
        """Keep ``--api-workers`` processes alive: start the first, then the others once it is ready.

        Raises ``ModelLoadError``. Cancellation: they are killed.
        """
        async with trio.open_nursery() as nursery:
            for number in range(self.config.processes.api_workers):
                nursery.start_soon(keep_alive, f"API worker {number}", partial(self._live, number))
                await self.ready.wait()

    async def _live(self, number: int) -> ChildEnd:
        if self._draining:
            await trio.sleep_forever()  # the others refuse all requests by now
        self.starts[number] += 1
        fd = self.listening.fileno()
        job = ApiJob(encode_config(self.config), str(self.socket_folder), number, fd, joins=bool(self._children))
        async with open_child(MODULE, job, ToParent, fds=[fd]) as child:
            self._children.add(child)
            ready_at = math.inf
            try:
                if self._draining:  # since before it was started
                    await _send(Drain(), child)
                while (status := await child.status()) is not None:
                    if isinstance(status, Ready):
                        ready_at = trio.current_time()
                        self.ready.set()
                    elif self.ready.is_set():
                        logger.error("an API worker cannot start: %s", status.message)
                    else:
                        raise ModelLoadError(status.message)
            finally:
                self._children.discard(child)
            if self._draining:
                if not self._children:
                    self._drained.set()
                await trio.sleep_forever()  # it is not replaced
            return ChildEnd(child.end, max(0.0, trio.current_time() - ready_at))

    async def drain(self) -> None:
        """Tell all of them to finish their requests and exit, and wait until they have exited.

        Cancellation: they continue to drain.
        """
        self._draining = True
        await _send(Drain(), *self._children)
        if self._children:
            await self._drained.wait()

    async def reload(self) -> None:
        """Tell all of them to reload the files that the settings name. Cancellation: some may not get the message."""
        await _send(Reload(), *self._children)


async def _send(message: FromParent, *children: ChildProcess[ToParent]) -> None:
    for child in children:
        with suppress(trio.BrokenResourceError, trio.ClosedResourceError):  # it has exited already
            await child.channel.send(message)


def _snapshot(workers: ApiWorkers, engines: Supervisor | RayPlacement) -> Snapshot:
    """Return the launcher's own usage, the API processes' restarts, and the engines' snapshot."""
    of_engines = engines.snapshot()
    restarts = {api_process_name(number): {"restarts": starts - 1} for number, starts in workers.starts.items()}
    processes = {"launcher": process_usage(), **restarts}
    return Snapshot(of_engines.families, merged_load([of_engines, Snapshot([], {"processes": processes})]))


async def serve_by_workers(
    config: Config, loader: str, announce: Callable[[str, Mapping[str, str]], None], gpus: Sequence[Gpu] = ()
) -> None:
    """Serve until SIGTERM or SIGINT, then drain.

    ``announce(url, descriptions)`` is called when the first API process is ready; ``descriptions`` are, by model, how
    it is computed. The engine processes are on the ``gpus``, or on the device of the settings if there are none. All
    processes end at once at a second signal, or if the drain takes longer than ``--drain-timeout-s``. Raises
    ``ModelLoadError`` or ``EngineDeadError``. Cancellation: all processes are ended.
    """
    sockets = SocketFolder()
    with sockets, open_listening(config.network) as listening:
        folder = Path(sockets.name)
        workers, engines = ApiWorkers(config, folder, listening), supervisor_of(config, loader, folder, gpus)
        async with open_process_nursery() as nursery:
            nursery.start_soon(sockets.keep)
            nursery.start_soon(_drain_at, await nursery.start(watch_ends), workers, nursery.cancel_scope)
            await nursery.start(watch_reloads, workers.reload)
            await nursery.start(engines.run)
            nursery.start_soon(serve_snapshots, folder, partial(_snapshot, workers, engines))
            nursery.start_soon(workers.run)
            await workers.ready.wait()
            announce(url_of(listening, config.network), engines.descriptions)
            await feed_watchdog(partial(gather_snapshots, folder), config.scheduling.batch_timeout_s)


async def _drain_at(ending: trio.Event, workers: ApiWorkers, everything: trio.CancelScope) -> None:
    """Drain at the first signal; cancel everything afterwards, or if that takes too long."""
    await ending.wait()
    logger.info("draining")
    notify(*STOPPING)
    with trio.move_on_after(workers.config.time_limits.drain_timeout_s + DRAIN_MARGIN_S):
        await workers.drain()
    everything.cancel(reason="drained")
