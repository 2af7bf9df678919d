"""Engines on the nodes of Ray's test cluster: real processes, ended by real signals; what is lost comes back."""

import logging
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import httpx
import numpy as np
import psutil
import pytest
import trio

from tests.conftest import client_of
from tests.pipes import read, write
from tests.ray.cluster_process import (
    ACTOR,
    HEAD,
    ClusterProcess,
    asking,
    leaving_nothing,
    load_of,
    ray_cluster,
    until_load,
    until_ready,
)
from tests.server.programs import script
from tests.server.server_process import (
    API_PROCESS,
    ENGINE_PROCESS,
    LAUNCHER,
    RAY_PROCESS,
    SCRIPTED,
    START_LIMIT_S,
    ServerProcess,
    free_port,
    launched,
    scripted,
    until,
)
from trio_pool_serve.cli import check_references, read_config
from trio_pool_serve.config import ProcessesConfig
from trio_pool_serve.engine.places.ray_cluster import open_cluster, resources_of
from trio_pool_serve.errors import ModelLoadError

logger = logging.getLogger(__name__)

COMMAND = LAUNCHER[:-2]  # without --replicas 1

TEXTS = [f"{'trio owns tasks by nurseries ' * (number % 7)}text {number}" for number in range(24)]


@pytest.fixture(scope="module")
def pipes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pipes")
    for name in ("launched", "go"):
        os.mkfifo(folder / name)
    return folder


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, pipes: Path) -> Iterator[ClusterProcess]:
    with ray_cluster(tmp_path_factory.mktemp("cluster"), SCRIPT_PIPES=str(pipes)) as cluster:
        for _ in range(2):
            cluster.add_node(2)
        yield cluster


@pytest.fixture
def own_cluster(tmp_path: Path) -> Iterator[ClusterProcess]:
    """A cluster without nodes, for one test."""
    with ray_cluster(tmp_path, HF_HUB_OFFLINE="1") as cluster:
        yield cluster


@asynccontextmanager
async def serving(
    tmp_path: Path,
    folder: Path,
    cluster: ClusterProcess,
    *flags: str,
    replicas: int | str = 2,
    threads: int = 1,
    command: tuple[str, ...] = SCRIPTED,
) -> AsyncIterator[ServerProcess]:
    """Have a server whose replicas are all ready, the least number of a range."""
    by_ray = ("--engine", "ray", "--replicas", str(replicas))
    env = cluster.variables | {"OMP_NUM_THREADS": str(threads)}
    async with (
        launched(tmp_path, str(folder), *by_ray, *flags, command=command, env=env) as server,
        leaving_nothing(server, cluster),
    ):
        await until_ready(server, int(str(replicas).partition("..")[0]))
        yield server


@pytest.mark.ray
async def test_replicas_are_spread_replaced_when_an_actor_dies_and_drained_by_sigterm(
    tmp_path, scripted_folder, cluster, pipes
):
    async with serving(tmp_path, scripted_folder, cluster) as server:
        engines = cluster.processes(ENGINE_PROCESS)
        assert len({cluster.node_of(engine) for engine in engines}) == len(engines) == 2
        assert server.processes(ENGINE_PROCESS) == []
        async with asking(server, [5], 4, pause_s=0.02) as statuses:
            cluster.processes(ACTOR)[0].kill()
            await until_ready(server, 2, restarts=1)
        assert statuses[200]
        assert set(statuses) <= {200, 503}
        await until(lambda: len(cluster.processes(ENGINE_PROCESS)) == 2)
        assert len({*cluster.processes(ENGINE_PROCESS)} & {*engines}) == 1

        await server.wait_computing()
        answers: list[httpx.Response] = []

        async def slow() -> None:
            answers.append(await server.ask(script.WAITS))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(slow)
            await read(pipes / "launched")
            one(server.processes(RAY_PROCESS)).send_signal(signal.SIGTERM)  # systemd sends it to all processes
            server.signal()
            await server.wait_logged("draining")
            assert not answers
            await write(pipes / "go", "go")
        assert [answer.status_code for answer in answers] == [200]
        assert await server.wait_exit() == 0
        assert "SIGTERM received at" not in server.log  # by the handler of Ray's core
    await until(lambda: cluster.is_empty)


@pytest.mark.ray
@pytest.mark.slow
async def test_a_replica_that_the_queue_does_not_need_any_more_computes_its_rows_before_it_ends(
    tmp_path, scripted_folder, cluster, pipes
):
    flags = ("--max-queue-s", "2.5")
    async with serving(tmp_path, scripted_folder, cluster, *flags, replicas="1..2") as server:
        with trio.CancelScope() as flood:
            async with asking(server, [[5] * 64] * 256, 8, pause_s=0) as statuses:
                await until_load(server, lambda load: of_two(load, "batches") >= 10)  # rows are sent to both
                flood.cancel()
        assert set(statuses) <= {200, 429}  # the queue may be as long as it is allowed to be
        await until_load(server, lambda load: load.get("queued_rows") == 0)
        answers: list[int] = []

        async def hold(*more: int) -> None:
            answers.append((await server.ask(script.WAITS, *more)).status_code)

        async with trio.open_nursery() as held:
            for more in ([5] * 31, []):  # one on each: the short row goes to where the long one is not
                held.start_soon(hold, *more)
                with trio.fail_after(START_LIMIT_S):
                    await read(pipes / "launched")
            await until_load(server, lambda load: of_two(load, "in_flight_batches") >= 1)
            await server.wait_logged("2 replicas become 1")
            await trio.sleep(2)  # to end an actor with its rows takes less
            assert len(cluster.processes(ENGINE_PROCESS)) == 2
            assert not answers
            await write(pipes / "go", "go")
        assert answers == [200, 200]
        await server.wait_logged("is drained")
        await until(lambda: len(cluster.processes(ENGINE_PROCESS)) == 1)
        await server.wait_computing()


def of_two(load: dict, what: str) -> int:
    """Return the least number of something that two engine processes have said; 0 if there are not two."""
    found = [each.get(what, 0) for each in load.get("replicas", {}).values()]
    return min(found) if len(found) == 2 else 0


@pytest.mark.ray
async def test_a_process_that_talks_to_ray_and_is_killed_takes_the_engines_with_it_and_is_replaced(
    tmp_path, scripted_folder, cluster
):
    async with serving(tmp_path, scripted_folder, cluster, threads=2) as server:
        first, engines = one(server.processes(RAY_PROCESS)), cluster.processes(ENGINE_PROCESS)
        # As many as CPUs are reserved, though the nodes have 1.
        assert [engine.environ()["OMP_NUM_THREADS"] for engine in engines] == ["2", "2"]
        first.kill()
        await until(lambda: not {*engines} & {*cluster.processes(ENGINE_PROCESS)})
        answer = await server.ask(5)  # there may be an engine by now
        assert answer.status_code in (200, 503)
        await until_ready(server, 2)
        await server.wait_computing()
        assert one(server.processes(RAY_PROCESS)) != first


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.parametrize("api_workers", [1, 2])
async def test_only_a_process_for_it_talks_to_ray(tmp_path, scripted_folder, cluster, api_workers):
    async with serving(tmp_path, scripted_folder, cluster, "--api-workers", str(api_workers)) as server:
        await until(lambda: len(server.processes(API_PROCESS)) == (api_workers if api_workers > 1 else 0))
        assert (await server.ask(5)).status_code == 200
        launcher = psutil.Process(server.process.pid)
        family = [launcher, *launcher.children(recursive=True)]
        has_ray = [process for process in family if any("_raylet" in at.path for at in process.memory_maps())]
        assert has_ray == server.processes(RAY_PROCESS)
        assert len(has_ray) == 1


def one(processes: list[psutil.Process]) -> psutil.Process:
    (process,) = processes
    return process


@pytest.mark.ray
@pytest.mark.slow
async def test_a_server_outlives_the_head_of_its_cluster_and_uses_the_next_one(tmp_path, scripted_folder):
    """Ray ends the processes of nodes and drivers when the head is gone, by default after a minute."""
    port, soon = free_port(), {"RAY_gcs_rpc_server_reconnect_timeout_s": "3"}
    statuses: list[int] = []

    async def keep_asking(server: ServerProcess) -> None:
        while True:
            statuses.append((await server.ask(5)).status_code)
            await trio.sleep(0.02)

    async with AsyncExitStack() as stack, trio.open_nursery() as nursery:
        cluster = stack.enter_context(ray_cluster(tmp_path, port=port, **soon))
        cluster.add_node(2)
        by_ray = ("--engine", "ray", "--replicas", "2")
        launch = scripted(tmp_path, scripted_folder, *by_ray, env=soon | cluster.variables)
        server = await stack.enter_async_context(launch)
        await until_ready(server, 2)
        for _ in range(4):
            nursery.start_soon(keep_asking, server)
        one(cluster.processes(HEAD)).kill()
        statuses.clear()
        await until(lambda: 503 in statuses)
        assert statuses[0] == 200, "engines compute until their nodes end"
        await server.wait_logged("cannot be reached")
        await server.wait_until("/readyz", 503)
        states = {replica["state"] for replica in (await load_of(server))["replicas"].values()}
        assert states == {"loading"}
        with ray_cluster(tmp_path, port=port) as restarted:
            restarted.add_node(2)
            await until_ready(server, 2)
            await server.wait_until("/readyz")
            nursery.cancel_scope.cancel(reason="it has recovered")
            server.signal()
            assert await server.wait_exit() == 0
            await until(lambda: restarted.is_empty)
    assert {*statuses} <= {200, 503}


# -- a real model -------------------------------------------------------------------------------------


async def embed(server: ServerProcess, texts: list[str]) -> np.ndarray:
    async with client_of(server.url) as client:
        answer = await client.post("/v1/embeddings", json={"input": texts})
    assert answer.status_code == 200
    return np.array([row["embedding"] for row in answer.json()["data"]])


async def recover(server: ServerProcess, restarts: int, kill: Callable[[], None]) -> None:
    """Kill, and wait until all replicas are ready again; meanwhile every request is answered."""
    async with asking(server, TEXTS[:2], 2, pause_s=0.05) as statuses:
        await trio.to_thread.run_sync(kill)
        began = trio.current_time()
        await until_ready(server, 2, restarts)
        took = trio.current_time() - began
    assert set(statuses) <= {200, 503}
    assert statuses[200]
    logger.info("recovered in %.1f s: %s", took, dict(statuses))


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.alone  # beside other tests it takes five times as long
async def test_ray_agrees_with_the_local_engine_and_what_dies_is_replaced(tmp_path, minilm, own_cluster):
    nodes = {own_cluster.add_node(2), own_cluster.add_node(2)}
    local_engine = ("--engine", "local", "--replicas", "1", "--dtype", "float32")
    async with launched(tmp_path, str(minilm), *local_engine, command=COMMAND) as server:
        local = await embed(server, TEXTS)
    async with serving(tmp_path, minilm, own_cluster, "--dtype", "float32", command=COMMAND) as server:
        assert np.abs(await embed(server, TEXTS) - local).max() < 1e-6
        for restarts, what in enumerate((ACTOR, ENGINE_PROCESS), start=1):
            await recover(server, restarts, own_cluster.processes(what)[0].kill)
        engines = own_cluster.processes(ENGINE_PROCESS)
        assert len({own_cluster.node_of(engine) for engine in engines}) == 2  # as before
        await recover(server, 3, lambda: own_cluster.kill_node(nodes.pop()))
        await server.wait_computing()
        assert np.abs(await embed(server, TEXTS) - local).max() < 1e-6


@pytest.mark.ray
@pytest.mark.slow
async def test_ray_s_workers_run_no_module_of_the_server_s_current_folder(tmp_path, minilm, own_cluster):
    folder = tmp_path / "current"
    folder.mkdir()
    for name in ("msgspec", "trio", "torch", "trio_pool_serve"):
        note = f"open({str(folder / 'ran')!r}, 'a').write(__name__ + ' ')"
        (folder / f"{name}.py").write_text(f"{note}\nraise ImportError('run from the current folder')\n")
    own_cluster.add_node(1)
    command = ("env", "-C", str(folder), str(Path(sys.executable).with_name("trio-pool-serve")), "serve")
    async with serving(tmp_path, minilm, own_cluster, "--backend", "torch", replicas=1, command=command) as server:
        await server.wait_computing()
        assert not (folder / "ran").exists()


@pytest.mark.ray
@pytest.mark.slow
async def test_a_server_that_is_killed_while_models_load_leaves_nothing_on_the_nodes(tmp_path, minilm, own_cluster):
    own_cluster.add_node(2)
    by_ray = ("--engine", "ray", "--replicas", "2")
    async with launched(
        tmp_path, str(minilm), *by_ray, command=COMMAND, env=own_cluster.variables, wait_ready=False
    ) as server:
        await until(lambda: len(own_cluster.processes(ENGINE_PROCESS)) == 2)
        assert "is ready" not in server.log
        server.signal(signal.SIGKILL)
        await until(lambda: own_cluster.is_empty)


@pytest.mark.ray
@pytest.mark.slow
async def test_a_replica_without_room_waits_for_a_node_that_joins(tmp_path, minilm, own_cluster):
    own_cluster.add_node(1)
    by_ray = ("--engine", "ray", "--replicas", "2")
    launch = launched(tmp_path, str(minilm), *by_ray, command=COMMAND, env=own_cluster.variables)
    async with launch as server:  # ready with one of them
        await server.wait_logged("waits for a node")
        states = ["loading", "ready"]
        await until_load(server, lambda load: sorted(each["state"] for each in load["replicas"].values()) == states)
        own_cluster.add_node(1)
        await until_ready(server, 2)


# -- settings ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("address", "said"), [("127.0.0.1:1", "cannot be reached"), ("ray://127.0.0.1:10001", "Set it to HOST:PORT")]
)
async def test_a_cluster_that_cannot_be_used_is_said_to_be_so(monkeypatch, address, said):
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(ModelLoadError, match=f"RAY_ADDRESS={address}.*{said}"):
        async with open_cluster(ProcessesConfig()):
            pass


@pytest.mark.parametrize(("threads", "cpus"), [(None, 1), ("3", 3), ("0", 1), ("4,2", 1)])
def test_a_cpu_is_reserved_for_each_thread_of_a_replica(monkeypatch, threads, cpus):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if threads is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", threads)
    assert resources_of(ProcessesConfig()) == {"CPU": cpus}
    assert resources_of(ProcessesConfig(gpus_per_replica=0.5)) == {"CPU": cpus, "GPU": 0.5}


def test_without_the_extra_the_command_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ValueError, match=r"pip install 'trio-pool-serve\[ray\]'"):
        check_references(read_config(["m", "--engine", "ray"]))
