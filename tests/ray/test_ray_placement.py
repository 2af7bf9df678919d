"""Engines on the nodes of Ray's test cluster, with scripted runners: real processes, ended by real signals."""

import os
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import psutil
import pytest
import trio

from tests.ray.cluster_process import ACTOR, ClusterProcess, ask, load_of, ray_cluster, until, until_ready
from tests.server.programs import script
from tests.server.server_process import API_PROCESS, ENGINE_PROCESS, SCRIPTED, ServerProcess, free_port, launched
from trio_pool_serve.cli import check_references, read_config
from trio_pool_serve.config import RayConfig
from trio_pool_serve.engine.remote.ray_cluster import open_cluster
from trio_pool_serve.errors import ModelLoadError

RECOVERY_LIMIT_S = 20.0


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


@asynccontextmanager
async def serving(
    tmp_path: Path, folder: Path, cluster: ClusterProcess, *flags: str, replicas: int = 2
) -> AsyncIterator[ServerProcess]:
    by_ray = ("--engine", "ray", "--ray-address", cluster.address, "--replicas", str(replicas))
    async with launched(tmp_path, str(folder), *by_ray, *flags, command=SCRIPTED) as server:
        await until_ready(server, replicas)
        yield server


async def read(pipe: Path) -> str:
    return await trio.to_thread.run_sync(pipe.read_text, abandon_on_cancel=True)


@pytest.mark.ray
async def test_replicas_are_spread_replaced_when_an_actor_dies_and_drained_by_sigterm(
    tmp_path, scripted_folder, cluster, pipes
):
    async with serving(tmp_path, scripted_folder, cluster) as server:
        engines = cluster.processes(ENGINE_PROCESS)
        assert len({cluster.node_of(engine) for engine in engines}) == len(engines) == 2
        assert server.processes(ENGINE_PROCESS) == []
        statuses: list[int] = []

        async def keep_asking() -> None:
            while True:
                statuses.append((await ask(server, 5)).status_code)
                await trio.sleep(0.02)

        async with trio.open_nursery() as nursery:
            for _ in range(4):
                nursery.start_soon(keep_asking)
            cluster.processes(ACTOR)[0].kill()
            with trio.fail_after(RECOVERY_LIMIT_S):
                await until_ready(server, 2, restarts=1)
            nursery.cancel_scope.cancel()
        assert 200 in statuses
        assert set(statuses) <= {200, 503}
        await until(lambda: len(cluster.processes(ENGINE_PROCESS)) == 2)
        assert len({*cluster.processes(ENGINE_PROCESS)} & {*engines}) == 1

        await server.wait_computing()
        answers: list[httpx.Response] = []

        async def slow() -> None:
            answers.append(await ask(server, script.WAITS))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(slow)
            await read(pipes / "launched")
            server.signal()
            await server.wait_logged("draining")
            assert not answers
            await trio.to_thread.run_sync((pipes / "go").write_text, "go")
        assert [answer.status_code for answer in answers] == [200]
        assert await server.wait_exit() == 0
        assert "SIGTERM received at" not in server.log  # by the handler of Ray's core
    await until(lambda: cluster.is_empty)


@pytest.mark.ray
async def test_clients_that_leave_leave_no_work_on_the_node(tmp_path, scripted_folder, cluster, pipes):
    flags = ("--max-in-flight", "1")
    async with (
        serving(tmp_path, scripted_folder, cluster, *flags, replicas=1) as server,
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(ask, server, script.WAITS)
        await read(pipes / "launched")
        async with trio.open_nursery() as clients:
            for _ in range(8):
                clients.start_soon(ask, server, 5)
            await until_queued(server, 8)
            clients.cancel_scope.cancel()
        await until_queued(server, 0)  # though the batch before them is still computed
        await trio.to_thread.run_sync((pipes / "go").write_text, "go")


async def until_queued(server: ServerProcess, rows: int) -> None:
    """Wait until the engine process has said that so many rows are queued."""
    with trio.fail_after(30):
        while (await load_of(server)).get("queued_rows") != rows:  # noqa: ASYNC110  (another process)
            await trio.sleep(0.05)


@pytest.mark.ray
@pytest.mark.slow
async def test_only_the_launcher_of_several_processes_talks_to_ray(tmp_path, scripted_folder, cluster):
    async with serving(tmp_path, scripted_folder, cluster, "--api-workers", "2") as server:
        await until(lambda: len(server.processes(API_PROCESS)) == 2)
        assert (await ask(server, 5)).status_code == 200
        has_ray = {
            process.pid for process in family_of(server) if any("_raylet" in at.path for at in process.memory_maps())
        }
        assert has_ray == {server.process.pid}
        server.signal()
        assert await server.wait_exit() == 0
    await until(lambda: cluster.is_empty)


def family_of(server: ServerProcess) -> list[psutil.Process]:
    return [psutil.Process(server.process.pid), *server.processes(API_PROCESS)]


async def test_a_cluster_that_cannot_be_reached_is_said_to_be_so():
    with pytest.raises(ModelLoadError, match="cannot be reached"):
        async with open_cluster(RayConfig(ray_address=f"127.0.0.1:{free_port()}")):
            pass


def test_without_the_extra_the_command_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ValueError, match=r"pip install trio-pool-serve\[ray\]"):
        check_references(read_config(["m", "--engine", "ray"]))
