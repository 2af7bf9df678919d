"""Replicas that Ray places, with a cluster that is made up: nodes, and free places on them."""

import math
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Literal, TypeAlias

import psutil
import pytest
import trio
from attrs import define, field

from tests import conftest
from tests.engine.places.test_local_places import LOADER
from trio_pool_serve.cli import read_config
from trio_pool_serve.config import ProcessesConfig, encode_config
from trio_pool_serve.engine.places import ray_cluster as module
from trio_pool_serve.engine.places import ray_places, supervisor
from trio_pool_serve.engine.places.queue_scaling import QueueSeconds
from trio_pool_serve.engine.places.ray_cluster import CONTROL_CALLS, EngineActor, NodeLostError, RayCluster, run_child
from trio_pool_serve.engine.places.ray_places import AVOIDED_S, ActorPlaces
from trio_pool_serve.engine.places.supervisor import RETRY_FAILED_S, EngineJob, Loaded, Replica
from trio_pool_serve.server.engine_process import SNAPSHOT_S
from trio_pool_serve.telemetry.metrics import Metrics
from trio_pool_serve.telemetry.snapshots import Snapshot, families_of

LOADING_S, DOWN_AFTER_S = 5.0, 60.0
until = partial(conftest.until, pause_s=0.1)  # in virtual time

Loading: TypeAlias = Literal["loads", "fails", "dies"]


@define(eq=False)
class Node:
    name: str
    free_places: int = 1
    loading: Loading = "loads"
    """What becomes of a model there."""


@define(eq=False)
class Group:
    avoided: set[str]
    node: Node | None = None


@define(eq=False)
class Actor:
    """An actor whose engine process is busy for a share of the time."""

    cluster: "MadeUpCluster"
    group: Group
    is_ready: bool = False
    has_left: bool = False
    _ended: trio.Event = field(factory=trio.Event)
    _is_lost: bool = False

    async def node(self) -> str:
        """Wait for a free place: on the node with the most."""
        while self.group.node is None:
            free = [one for one in self.cluster.nodes if one.free_places and one.name not in self.group.avoided]
            if free:
                self.group.node = max(free, key=lambda each: each.free_places)
                self.group.node.free_places -= 1
            else:
                await trio.sleep(0.5)
        return self.group.node.name

    async def run(self, _: object) -> tuple[str, str]:
        if self.group.node.loading != "loads":
            await trio.sleep(LOADING_S)
            return "exited with status 1", "the GPU is broken" if self.group.node.loading == "fails" else ""
        await self._ended.wait()
        if self._is_lost:
            raise NodeLostError("gone")
        return "exited with status 0", ""

    async def status(self) -> tuple[float, Loaded | Snapshot]:
        if not self.is_ready:
            await trio.sleep(LOADING_S if self.group.node.loading == "loads" else math.inf)
            self.is_ready = True
            return trio.current_time(), Loaded("a model", f"{self.group.node.name}:1", 1)
        await trio.sleep(SNAPSHOT_S)
        metrics, now = Metrics(), trio.current_time()
        metrics.of_engine("m").busy.inc(self.cluster.busy_share * now)
        return now, Snapshot(families_of(metrics.registry), {})

    async def leave(self) -> None:
        self.has_left = True
        self.end()

    def end(self) -> None:
        self._ended.set()

    def lose(self) -> None:
        self._is_lost = True
        self.end()


@define(eq=False)
class MadeUpCluster:
    nodes: list[Node]
    busy_share: float = 0.0
    groups: list[Group] = field(factory=list)
    """Those that are reserved."""
    actors: list[Actor] = field(factory=list)
    """All that were started."""

    async def reserve(self, avoided: set[str]) -> Group:
        await trio.lowlevel.checkpoint()
        self.groups.append(Group(avoided))
        return self.groups[-1]

    async def give_back(self, group: Group) -> None:
        self.groups.remove(group)
        if group.node is not None:
            group.node.free_places += 1

    async def start(self, group: Group) -> Actor:
        await trio.lowlevel.checkpoint()
        self.actors.append(Actor(self, group))
        return self.actors[-1]

    async def kill(self, actor: Actor) -> None:
        actor.end()

    async def call(self, method: Callable, *arguments: object) -> object:
        return await method(*arguments)

    @property
    def places(self) -> list[str]:
        """The names of the nodes where there are replicas."""
        return sorted(group.node.name for group in self.groups if group.node is not None)


@define(eq=False)
class Running:
    """``ActorPlaces`` of one model, and an API process that says how long its queue is."""

    cluster: MadeUpCluster
    engines: ActorPlaces
    queue: QueueSeconds
    queue_s: float = 0.0

    @property
    def ready(self) -> list[int]:
        """The numbers of the replicas that API processes can find."""
        return [place.replica.number for place in self.engines.places if place.path.exists()]

    @property
    def failed(self) -> list[int]:
        """The numbers of the replicas that have failed; which one is placed first is not known."""
        return [place.replica.number for place in self.engines.places if place.state == "failed"]

    async def until_ready(self, *numbers: int, limit_s: float = 30.0) -> None:
        await until(lambda: self.ready == [*numbers], limit_s)

    async def grow(self, *numbers: int) -> None:
        """Have a queue that is too long until these replicas are ready, and then none."""
        self.queue_s = 3.0
        await self.until_ready(*numbers)
        self.queue_s = 0.0

    async def estimate(self) -> None:
        while True:
            self.queue.write(0, self.queue_s)
            await trio.sleep(0.5)


@pytest.fixture
def running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    @asynccontextmanager
    async def run(*nodes: Node, replicas: str):
        cluster = MadeUpCluster([*nodes])

        @asynccontextmanager
        async def open_cluster(_: object) -> AsyncIterator[MadeUpCluster]:
            yield cluster

        monkeypatch.setattr(ray_places, "open_cluster", open_cluster)
        config = read_config(["m", "--engine", "ray", "--replicas", replicas])
        made = Running(cluster, ActorPlaces(config, "no:loader", tmp_path, key="k"), QueueSeconds.open(tmp_path, 0, 1))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(made.estimate)
            await nursery.start(made.engines.run)
            yield made
            nursery.cancel_scope.cancel()

    return run


async def test_replicas_come_with_the_queue_and_one_that_idles_is_drained(running, autojump_clock):
    async with running(Node("a", 4), replicas="1..4") as server:
        await server.until_ready(0)
        await server.grow(0, 1)
        await trio.sleep(DOWN_AFTER_S - 10)
        assert server.ready == [0, 1]
        await server.until_ready(0)
        assert [actor.has_left for actor in server.cluster.actors] == [False, True]
        await until(lambda: server.cluster.places == ["a"], 5)


async def test_replicas_that_compute_most_of_the_time_stay_though_nothing_waits(running, autojump_clock):
    async with running(Node("a", 2), replicas="1..2") as server:
        server.cluster.busy_share = 0.6
        await server.until_ready(0)
        await server.grow(0, 1)
        await trio.sleep(20 * DOWN_AFTER_S)
        assert server.ready == [0, 1]
        server.cluster.busy_share = 0.0
        await server.until_ready(0, limit_s=3 * DOWN_AFTER_S)


async def test_the_only_replica_that_works_is_never_drained(running, autojump_clock):
    async with running(Node("a"), Node("b"), replicas="1..2") as server:
        await server.until_ready(0)
        await server.grow(0, 1)
        first, second = server.cluster.actors
        first.lose()
        first.group.node.free_places = -1  # the node is gone
        await server.until_ready(1)
        await trio.sleep(20 * DOWN_AFTER_S)
        assert server.ready == [1]
        assert not second.has_left
        assert [replica.is_wanted for replica in server.engines.places] == [False, True]


async def test_a_replica_that_has_failed_does_not_keep_others_from_being_added(running, autojump_clock):
    async with running(Node("a"), Node("b", loading="fails"), replicas="2..3") as server:
        await until(lambda: bool(server.failed and server.ready), 30)
        server.cluster.nodes.append(Node("c", 9))
        await server.grow(*server.ready, 2)
        assert server.cluster.places == ["a", "c"]


async def test_an_actor_that_dies_after_it_was_ready_is_replaced_in_the_same_place(running, autojump_clock):
    async with running(Node("a"), replicas="1") as server:
        await server.until_ready(0)
        (group,) = server.cluster.groups
        server.cluster.actors[0].end()
        await server.until_ready()
        await server.until_ready(0)
        assert server.cluster.groups == [group]
        assert len(server.cluster.actors) == 2


async def test_one_that_dies_while_it_loads_gives_its_place_back(running, autojump_clock):
    async with running(Node("a", loading="dies"), replicas="1") as server:
        await until(lambda: len(server.cluster.actors) == 3, 60)
        assert len({actor.group for actor in server.cluster.actors}) == 3
        assert len(server.cluster.groups) == 1


async def test_a_replica_whose_model_cannot_be_loaded_goes_to_another_node_and_has_no_place_meanwhile(
    running, autojump_clock
):
    bad, other = Node("b", loading="fails"), Node("c")
    async with running(Node("a"), bad, replicas="2") as server:
        await until(lambda: bool(server.failed), 30)
        await until(lambda: server.cluster.places == ["a"], 5)
        bad.free_places = 9
        server.cluster.nodes.append(other)
        await trio.sleep(RETRY_FAILED_S - 60)
        assert server.cluster.places == ["a"]
        await server.until_ready(0, 1, limit_s=90)
        assert server.cluster.places == ["a", "c"]


async def test_a_replica_waits_only_once_for_another_node_than_that_where_its_model_could_not_be_loaded(
    running, autojump_clock
):
    only = Node("a")
    async with running(only, replicas="1") as server:
        await server.until_ready(0)
        only.loading = "fails"
        server.cluster.actors[0].end()
        await until(lambda: len(server.cluster.actors) == 3, 30)
        only.loading = "loads"
        began = trio.current_time()
        await server.until_ready(0, limit_s=2 * AVOIDED_S)
        assert trio.current_time() - began >= AVOIDED_S
        assert server.cluster.places == ["a"]


async def test_a_replica_that_has_failed_after_it_was_ready_gives_its_place_back_before_it_rests(
    running, autojump_clock, monkeypatch
):
    monkeypatch.setattr(supervisor, "MAX_RESTARTS", 1)
    async with running(Node("a"), Node("b"), replicas="2") as server:
        await server.until_ready(0, 1)
        while not server.failed:
            for actor in [actor for actor in server.cluster.actors if actor.group.node.name == "b"]:
                actor.end()
            await trio.sleep(LOADING_S)
        await until(lambda: server.cluster.places == ["a"], 5)
        await server.until_ready(0, 1, limit_s=RETRY_FAILED_S + 30)


# -- calls of Ray's API -------------------------------------------------------------------------------


async def test_ends_that_ray_does_not_answer_leave_room_for_other_calls(monkeypatch):
    answers = threading.Event()
    monkeypatch.setattr(module, "CLOSE_TIMEOUT_S", 0.01)
    monkeypatch.setattr("ray.kill", lambda _: answers.wait())
    cluster = RayCluster(ProcessesConfig())
    try:
        for _ in range(2 * CONTROL_CALLS):
            await cluster.kill(None)
        with trio.fail_after(60):
            assert await cluster.in_thread(lambda: "called") == "called"
    finally:
        answers.set()


async def test_an_end_that_fails_is_logged_and_raises_nothing(monkeypatch, caplog):
    def fail(_: object) -> None:
        raise ValueError("no such actor")

    monkeypatch.setattr("ray.kill", fail)
    await RayCluster(ProcessesConfig()).kill(None)
    assert "no such actor" in caplog.text


@pytest.mark.slow
async def test_an_engine_process_of_an_actor_that_is_stopped_is_killed(scripted_folder):
    """As on this machine: its snapshots show that it is alive."""
    config = read_config([f"m={scripted_folder}", "--engine", "process", "--device", "cpu", "--batch-timeout-s", "1"])
    replica = Replica("m", "cpu", 0, 1, 0, 1)
    job = EngineJob(encode_config(config), replica, LOADER, address="127.0.0.1", key="k" * 32)
    actor, ends = EngineActor(threads=1), list[tuple[str, str]]()

    async def run() -> None:
        ends.append(await run_child(actor, job))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(run)
        loaded = await trio.to_thread.run_sync(actor.status)
        assert isinstance(loaded[1], Loaded)
        for _ in range(3):
            assert isinstance((await trio.to_thread.run_sync(actor.status))[1], Snapshot)
        psutil.Process(loaded[1].pid).suspend()
    assert ends == [("was ended by signal 9", "")]
