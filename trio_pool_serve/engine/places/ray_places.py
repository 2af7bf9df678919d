"""The places on the nodes of a Ray cluster: an actor for each, whose engine process API processes reach by TCP.

A process of its own talks to Ray (``ActorPlaces``), and the server keeps that process alive (``RayPlacement``). Ray's
core ends the process that it is in when the cluster's head has not answered for a minute. That must not be the server:
its clients would lose their connections, and engines that still compute their rows.
"""

import logging
import math
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import trio
from attrs import define, field

from trio_pool_serve.config import encode_config
from trio_pool_serve.engine.places.queue_scaling import (
    SCALING_S,
    BusyShare,
    QueueScaling,
    QueueSeconds,
    busy_seconds,
    choose_wanted,
)
from trio_pool_serve.engine.places.ray_cluster import NodeLostError, RayCluster, open_cluster, resources_of
from trio_pool_serve.engine.places.supervisor import Loaded, Place, Supervisor
from trio_pool_serve.errors import ModelLoadError, PoolServeError
from trio_pool_serve.processes.child_process import ChildEnd, LoadFailed, keep_alive, open_child
from trio_pool_serve.telemetry.snapshots import Snapshot, merged_load

logger = logging.getLogger(__name__)

AVOIDED_S = 60.0
"""How long nothing is placed on a lost node: Ray notices ten to twenty seconds later that it has died. A replica whose
model could not be loaded on a node waits as long for resources on another."""

WAITING_S = 10.0
"""After this long without resources, a warning shows the resources that a replica waits for."""


@define(eq=False)
class Life:
    """One engine process of a place, from before an actor is placed for it until it has ended."""

    actor: Any = None
    """The Ray actor; ``None`` until it is placed."""
    node: str = ""
    """The id of the actor's node."""
    is_drained: bool = False
    """Whether it is being ended because it is not wanted any more."""
    snapshot: Snapshot | None = None
    """The latest snapshot from the engine process."""
    busy: BusyShare = field(factory=BusyShare)


@define(eq=False)
class ActorPlaces(Supervisor):
    """Keeps an actor for each place, with an engine process that API processes connect to by TCP.

    A placement group reserves the resources of a place. If an actor dies after its model was ready, it is replaced in
    the same group. If it was not ready, the node may be the problem, and the group is given back.

    This runs in a process of its own, see ``RayPlacement``. API processes find the addresses in ``socket_folder``.
    """

    key: str = field(kw_only=True)
    """The key by which API processes and engine processes authenticate each other."""
    _cluster: RayCluster = field(init=False)
    _groups: dict[Place, Any] = field(init=False, factory=dict)
    """The placement groups."""
    _lost_nodes: dict[str, float] = field(init=False, factory=dict)
    """The time at which each node was lost, by id."""
    _bad_nodes: defaultdict[Place, set[str]] = field(init=False, factory=lambda: defaultdict(set))
    """Nodes where the model could not be loaded; cleared when it is ready, or if there is no other node."""
    _lives: dict[Place, Life] = field(init=False, factory=dict)
    """The current life of each place that has an engine process or is about to start one."""

    def _device_of(self, process: int) -> tuple[None, str]:  # noqa: ARG002  (each process sees only its own GPU)
        by_ray = "cuda:0" if self.config.processes.gpus_per_replica else "cpu"
        return None, by_ray if self.config.loading.device == "auto" else self.config.loading.device

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Connect to Ray, then run as ``Supervisor.run``; ``started`` once this process is connected.

        Raises ``ModelLoadError`` if the cluster cannot be reached, too. Cancellation: the actors are killed, and their
        engine processes exit.
        """
        async with open_cluster(self.config.processes) as self._cluster, trio.open_nursery() as nursery:
            for model in range(len(self.config.sources)):
                nursery.start_soon(self._scale, model)
            await super().run(task_status=task_status)

    async def _live(self, place: Place) -> tuple[str, str]:
        life, how, failure = Life(), "", ""
        self._lives[place] = life
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._end_unwanted, place, life, nursery.cancel_scope)
            nursery.start_soon(self._log_waiting, place, life)
            try:
                async with self._placed(place, life):
                    nursery.start_soon(self._follow, place, life)
                    # The node has no folder of this server's: neither its sockets nor its files.
                    how, failure = await self._cluster.call(
                        life.actor.run, self._job_of(place, place.replica.device, key=self.key)
                    )
            except PoolServeError as error:
                how = f"could not be placed: {error}" if life.actor is None else f"was lost: {error}"
                if life.actor is not None and isinstance(error, NodeLostError):
                    self._lost_nodes[life.node] = trio.current_time()
            nursery.cancel_scope.cancel(reason="it has ended")
        place.path.unlink(missing_ok=True)  # only now has the task that writes it ended
        was_ready, place.state = place.state == "ready", "loading"
        del self._lives[place]
        if failure:
            self._bad_nodes[place].add(life.node)
        if not was_ready or life.node in self._avoided(place):
            await self._leave(place)
        if life.is_drained:
            logger.info("%s is drained", place)
            return "", ""
        return how, failure

    @asynccontextmanager
    async def _placed(self, place: Place, life: Life) -> AsyncIterator[None]:
        """Keep an actor during the block, on no avoided node. Waits for resources.

        After waiting ``AVOIDED_S`` without resources elsewhere, nodes where the model could not be loaded are allowed
        again: there may be no others. Raises ``PoolServeError``.
        """
        while True:
            if place not in self._groups:
                self._groups[place] = await self._cluster.reserve(self._avoided(place))
            actor = await self._cluster.start(self._groups[place])
            try:
                with trio.move_on_after(AVOIDED_S if self._avoided(place) else math.inf) as limit:
                    life.node = await self._cluster.call(actor.node)
                if not limit.cancelled_caught:
                    life.actor = actor
                    yield
                    return
            finally:
                await self._cluster.kill(actor)
            self._bad_nodes[place].clear()
            await self._leave(place)

    def _avoided(self, place: Place) -> set[str]:
        now = trio.current_time()
        lost = {node for node, lost_at in self._lost_nodes.items() if now < lost_at + AVOIDED_S}
        return lost | self._bad_nodes[place]

    async def _leave(self, place: Place) -> None:
        if (group := self._groups.pop(place, None)) is not None:
            await self._cluster.give_back(group)

    async def _follow(self, place: Place, life: Life) -> None:
        """Write the address of the engine process to a file once it is ready; keep its latest metrics, forever."""
        while True:
            try:
                at, status = await self._cluster.call(life.actor.status)
            except PoolServeError:
                return  # the call to ``run`` raises it, too
            if isinstance(status, Snapshot):
                life.snapshot = status
                life.busy.observe(at, busy_seconds(status))
            elif isinstance(status, Loaded):
                place.become_ready(status.description)
                self._bad_nodes[place].clear()
                new = place.path.with_suffix(".new")
                new.write_text(status.address)
                new.replace(place.path)
                logger.info(
                    "engine process %d at %s is ready: %s: %s", status.pid, status.address, place, status.description
                )

    async def _end_unwanted(self, place: Place, life: Life, scope: trio.CancelScope) -> None:
        """End an engine process that is not wanted any more, after it has computed its rows."""
        await self._wait_wanted(place, is_wanted=False)
        was_ready, place.state, life.is_drained = place.state == "ready", "loading", True
        if was_ready:
            place.path.unlink(missing_ok=True)
            with suppress(PoolServeError):
                await self._cluster.call(life.actor.leave)
            await trio.sleep(self.config.time_limits.drain_timeout_s)
            logger.warning("%s was ended before its rows were finished", place)
        scope.cancel(reason="it is not wanted")

    async def _log_waiting(self, place: Place, life: Life) -> None:
        await trio.sleep(WAITING_S)
        if life.actor is None:
            logger.warning("%s waits for a node with free resources: %s", place, resources_of(self.config.processes))

    async def _scale(self, model: int) -> None:
        """Adjust the number of wanted replicas of a model to its queue, forever."""
        name = self.config.sources[model].name
        places = [place for place in self.places if place.replica.model == name]
        least = sum(place.is_wanted for place in places)  # as at the start
        scaling = QueueScaling(least, len(places), self.config.scheduling.max_queue_s)
        queue = QueueSeconds.open(self.socket_folder, model, self.config.processes.api_workers)
        while True:
            await trio.sleep(SCALING_S)
            before, waiting_s = scaling.wanted, queue.longest
            states = [place.state for place in places if place.is_wanted]
            busy = sum(self._lives[place].busy.share for place in places if place.is_wanted and place.state == "ready")
            wanted = scaling.update(
                trio.current_time(), waiting_s, busy, ready=states.count("ready"), loading=states.count("loading")
            )
            if wanted != before:
                reason = f"{waiting_s:.1f} s in the queue, {busy:.1f} replicas busy"
                logger.info("%s: %d replicas become %d: %s", name, before, wanted, reason)
                choose_wanted(places, wanted)
                self._scaled.unpark_all()

    def snapshot(self) -> Snapshot:
        """Return the states of the places, and the snapshots of their engine processes."""
        snapshots = [super().snapshot(), *(life.snapshot for life in self._lives.values() if life.snapshot)]
        return Snapshot([family for each in snapshots for family in each.families], merged_load(snapshots))


MODULE = "trio_pool_serve.server.ray_process"


class RayJob(msgspec.Struct, tag=True, array_like=True):
    """The job: place engine processes that load models with ``loader``; API processes have the same ``key``.

    ``socket_folder`` contains the shared files: the addresses of engine processes, and the lengths of the queues.
    """

    config: bytes
    loader: str
    socket_folder: str
    key: str


class Connected(msgspec.Struct, tag=True, array_like=True):
    """The cluster has been reached; from now on the process reports the states of the places in ``socket_folder``.

    ``LoadFailed`` instead: it cannot be reached. ``LoadFailed`` afterwards: all places of a model have failed.
    """


def key_path(socket_folder: Path) -> Path:
    """Return the path of the key for engine processes that Ray places."""
    return socket_folder / "key"


@define(eq=False)
class RayPlacement:
    """Keeps alive the process that keeps the places of ``actors``, and reports their states while there is none.

    If it dies, Ray ends its actors, and so the engine processes; the next one places all of them again.
    """

    actors: ActorPlaces
    descriptions: dict[str, str] = field(factory=dict, init=False)
    """Empty: the models are described on other machines."""
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
            async with open_child(MODULE, job, Connected | LoadFailed) as child:
                while (status := await child.status()) is not None:
                    if isinstance(status, Connected):
                        connected_at = trio.current_time()
                        self._is_connected = self._has_connected = True
                    elif self._is_connected or not self._has_connected:
                        raise ModelLoadError(status.message)
                    else:
                        logger.error("%s", status.message)
        finally:
            self._is_connected = False
            for place in actors.places:
                place.path.unlink(missing_ok=True)  # the engine process there ends, too
        return ChildEnd(child.end, max(0.0, trio.current_time() - connected_at))

    def snapshot(self) -> Snapshot:
        """Return that all places are loading, while there is no process that reports their states."""
        return Snapshot([], {}) if self._is_connected else self.actors.snapshot()
