"""Engine processes on the nodes of a Ray cluster: Ray places them, rows go to them by TCP."""

import logging
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import trio
from attrs import define, evolve, field

from trio_pool_serve.config import encode_config
from trio_pool_serve.engine.remote.busy_share import BusyShare, busy_seconds
from trio_pool_serve.engine.remote.engine_job import EngineJob, LoadFailed
from trio_pool_serve.engine.remote.queue_scaling import QueueScaling, QueueSeconds, choose_wanted
from trio_pool_serve.engine.remote.ray_actor import SentSnapshot, Started
from trio_pool_serve.engine.remote.ray_cluster import NodeLostError, PlacedActor, RayCluster, open_cluster, resources_of
from trio_pool_serve.engine.remote.replica import Replica
from trio_pool_serve.engine.remote.supervisor import Supervisor
from trio_pool_serve.errors import ModelLoadError, PoolServeError
from trio_pool_serve.processes.child_process import ChildEnd
from trio_pool_serve.telemetry.snapshots import Snapshot, merged_load

logger = logging.getLogger(__name__)

AVOIDED_S = 60.0
"""For so long nothing is placed on a node that was lost: Ray notices ten to twenty seconds later that it has died. And
so long a replica whose model could not be loaded on a node waits for resources on another."""

SCALING_S = 0.5
"""How often the queue is looked at."""

SNAPSHOT_S = 2.0
"""How often the metrics of each engine process are fetched."""

WAITING_S = 10.0
"""After so long without a place the log says what a replica waits for."""

END_TIMEOUT_S = 5.0


def seconds_path(socket_folder: Path, model: int) -> Path:
    """Return the path of the ``QueueSeconds`` of the ``model``-th model."""
    return socket_folder / f"{model}.seconds"


@define(eq=False)
class Life:
    """One actor of a replica, from before it is placed until it has ended."""

    actor: PlacedActor | None = None
    """``None`` until it is placed."""
    status: Started | LoadFailed | None = None
    how: str = ""
    """It has ended: a phrase for the log."""
    ready_at: float = math.inf
    is_drained: bool = False
    is_lost: bool = False
    """Its node does not answer."""
    told: trio.Event = field(init=False, factory=trio.Event)
    """Set once ``status`` is known, or never will be."""

    @property
    def keeps_place(self) -> bool:
        """Whether the next actor gets the same place: one where the model was ready, and that is still needed."""
        return self.ready_at < math.inf and not self.is_drained and not self.is_lost


@define(eq=False)
class RayEngines(Supervisor):
    """The engine processes of all models of a server, each the child of an actor.

    Each replica has a placement group of its own, of one bundle: groups of strategy SPREAD go to the node with most
    left, one after the other. So each is placed as soon as a node has the resources, may leave alone, and
    after the loss of a node goes elsewhere before Ray has noticed; a group of several bundles would wait for that.
    Another actor in place of one that has died after it was ready has the same group. What was not ready may be wrong
    with the node: the group is given back.

    This is a process of its own, see ``RayPlacement``. API processes find the addresses in ``socket_folder``.
    """

    key: str = field(kw_only=True)
    """By which API processes know the engine processes."""
    _cluster: RayCluster = field(init=False)
    _groups: dict[Replica, Any] = field(init=False, factory=dict)
    """The placement groups."""
    _lost_nodes: dict[str, float] = field(init=False, factory=dict)
    """When they were lost, by id."""
    _bad_nodes: dict[Replica, set[str]] = field(init=False, factory=dict)
    """Where the model could not be loaded, since the replica was ready or found no other place."""
    _snapshots: dict[Replica, Snapshot] = field(init=False, factory=dict)
    """Those that the engine processes have sent last."""
    _busy: dict[Replica, BusyShare] = field(init=False, factory=dict)
    """How busy the engine processes are that are ready."""
    _scaled: trio.Event = field(init=False, factory=trio.Event)
    """Set when the number of replicas changes."""

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Connect to Ray, then keep an actor for each replica, forever; ``started`` once it is connected.

        Raises as ``Supervisor.run``, and ``ModelLoadError`` if the cluster cannot be reached. Cancellation: the actors
        are killed, and their engine processes exit.
        """
        least, most = self.config.processes.replica_range or (1, 1)
        async with open_cluster() as self._cluster, trio.open_nursery() as nursery:
            for replica in self.replicas:
                nursery.start_soon(self._keep_alive, replica, partial(self._live, replica))
            for model in range(len(self.config.sources) if least < most else 0):
                nursery.start_soon(self._scale, model)
            task_status.started()

    async def _live(self, replica: Replica) -> ChildEnd:
        """Run an engine process whenever there is to be one, until one ends that was not drained; return how."""
        while True:
            await self._wait_wanted(replica, is_wanted=True)
            life = Life()
            replica.begin()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._end_unwanted, replica, life, nursery.cancel_scope)
                nursery.start_soon(self._log_waiting, replica, life)
                try:
                    await self._run(replica, life)
                except PoolServeError as error:
                    life.how = f"not been placed: {error}"
                nursery.cancel_scope.cancel(reason="it has ended")
            replica.state = "loading"
            self._snapshots.pop(replica, None)
            self._busy.pop(replica, None)
            if not life.keeps_place:
                await self._give_back(replica)
            if life.is_drained:
                logger.info("%s is drained", replica)
                continue
            if isinstance(life.status, LoadFailed) and not replica.has_loaded:
                raise ModelLoadError(life.status.message)
            return ChildEnd(life.how, max(0.0, trio.current_time() - life.ready_at))

    async def _rest(self, replica: Replica) -> None:
        await self._give_back(replica)
        await super()._rest(replica)

    async def _wait_wanted(self, replica: Replica, *, is_wanted: bool) -> None:
        while replica.is_wanted is not is_wanted:
            await self._scaled.wait()

    async def _run(self, replica: Replica, life: Life) -> None:
        """Place an actor, which may raise ``PoolServeError``, and run an engine process in it until that ends."""
        async with self._placed(replica) as life.actor, trio.open_nursery() as nursery:
            nursery.start_soon(self._follow, replica, life, life.actor)
            try:
                life.how = await self._cluster.call(life.actor.handle.run, self._job_of(replica))
                with trio.move_on_after(END_TIMEOUT_S):
                    await life.told.wait()
                if isinstance(life.status, LoadFailed):
                    self._bad_nodes.setdefault(replica, set()).add(life.actor.node)
            except PoolServeError as error:
                life.how = f"been lost: {error}"
                if isinstance(error, NodeLostError):
                    life.is_lost = True
                    self._lost_nodes[life.actor.node] = trio.current_time()
            finally:
                replica.path.unlink(missing_ok=True)
                nursery.cancel_scope.cancel(reason="it has ended")

    @asynccontextmanager
    async def _placed(self, replica: Replica) -> AsyncIterator[PlacedActor]:
        """Have an actor for as long as the block lasts, not on a node that is avoided. Waits for resources.

        After a wait of ``AVOIDED_S`` without resources elsewhere the nodes where the model could not be loaded are
        allowed again: there may be no others.
        """
        while True:
            if replica not in self._groups:
                self._groups[replica] = await self._cluster.reserve(self.config.ray, self._avoided(replica))
            actor = await self._cluster.start(self.config.ray, self._groups[replica])
            try:
                with trio.move_on_after(AVOIDED_S if self._avoided(replica) else math.inf) as limit:
                    actor.node = await self._cluster.call(actor.handle.node)
                if not limit.cancelled_caught:
                    yield actor
                    return
            finally:
                await self._cluster.kill(actor)
            self._bad_nodes.pop(replica, None)
            await self._give_back(replica)

    def _avoided(self, replica: Replica) -> set[str]:
        now = trio.current_time()
        self._lost_nodes = {node: at for node, at in self._lost_nodes.items() if now < at + AVOIDED_S}
        return {*self._lost_nodes, *self._bad_nodes.get(replica, ())}

    async def _give_back(self, replica: Replica) -> None:
        if (group := self._groups.pop(replica, None)) is not None:
            await self._cluster.give_back(group)

    async def _follow(self, replica: Replica, life: Life, actor: PlacedActor) -> None:
        """Write down where the engine process listens once it is ready; then fetch its metrics, forever."""
        with suppress(PoolServeError):  # the call to ``run`` raises it, too
            try:
                life.status = await self._cluster.call(actor.handle.started)
            finally:
                life.told.set()
            if not isinstance(life.status, Started):
                return
            started, replica.state, replica.has_loaded = life.status, "ready", True
            self._bad_nodes.pop(replica, None)
            life.ready_at, busy = trio.current_time(), BusyShare()
            self._busy[replica] = busy
            new = replica.path.with_suffix(".new")
            new.write_text(started.address)
            new.replace(replica.path)
            logger.info(
                "engine process %d at %s is ready: %s: %s", started.pid, started.address, replica, started.description
            )
            while True:
                sent: SentSnapshot | None = await self._cluster.call(actor.handle.snapshot)
                if sent is not None:
                    self._snapshots[replica] = sent.snapshot
                    busy.observe(sent.at, busy_seconds(sent.snapshot))
                await trio.sleep(SNAPSHOT_S)

    async def _end_unwanted(self, replica: Replica, life: Life, scope: trio.CancelScope) -> None:
        """End an engine process that is not wanted any more, once it has computed its rows."""
        await self._wait_wanted(replica, is_wanted=False)
        life.is_drained = True
        if life.actor is not None and replica.state == "ready":
            replica.state = "loading"  # should it be wanted again, that is another process
            replica.path.unlink(missing_ok=True)
            with suppress(PoolServeError):
                await self._cluster.call(life.actor.handle.leave)
            await trio.sleep(self.config.time_limits.drain_timeout_s)
            logger.warning("%s is ended with rows unfinished", replica)
        scope.cancel(reason="it is not wanted")

    async def _log_waiting(self, replica: Replica, life: Life) -> None:
        await trio.sleep(WAITING_S)
        if life.actor is None:
            logger.warning("%s waits for a node that has %s left", replica, resources_of(self.config.ray))

    def _job_of(self, replica: Replica) -> EngineJob:
        config = evolve(self.config, loading=evolve(self.config.loading, device=replica.device))
        # The node has no folder of this server's: neither its sockets nor its files.
        return EngineJob(
            encode_config(config), replica.model, self.loader, "", -1, replica.numbers, replica.device, "", "", self.key
        )

    async def _scale(self, model: int) -> None:
        """Have as many replicas of a model as its queue needs, forever."""
        processes, name = self.config.processes, self.config.sources[model].name
        least, most = processes.replica_range or (1, 1)
        scaling = QueueScaling(least, most, self.config.scheduling.max_queue_s)
        queue = QueueSeconds.open(seconds_path(self.socket_folder, model), processes.api_workers)
        replicas = [replica for replica in self.replicas if replica.model == name]
        while True:
            await trio.sleep(SCALING_S)
            before, waiting_s = scaling.wanted, queue.longest
            ready = [each for each in replicas if each.is_wanted and each.state == "ready"]
            loading = [each for each in replicas if each.is_wanted and each.state == "loading"]
            busy = sum(self._busy[replica].share for replica in ready)
            wanted = scaling.update(trio.current_time(), waiting_s, busy, ready=len(ready), loading=len(loading))
            if wanted != before:
                logger.info(
                    "%s: %d replicas in place of %d: %.1f s in the queue, %.1f busy",
                    name,
                    wanted,
                    before,
                    waiting_s,
                    busy,
                )
                choose_wanted(replicas, wanted)
                self._scaled.set()
                self._scaled = trio.Event()

    def snapshot(self) -> Snapshot:
        """Return the states of the replicas, and what their engine processes have sent."""
        all_of_them = [super().snapshot(), *self._snapshots.values()]
        return Snapshot([family for each in all_of_them for family in each.families], merged_load(all_of_them))
