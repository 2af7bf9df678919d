"""A real model on the nodes of Ray's test cluster: what is lost comes back."""

import json
import logging
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
import trio

from tests.conftest import client_of
from tests.ray.cluster_process import (
    ACTOR,
    ClusterProcess,
    asking,
    leaving_nothing,
    ray_cluster,
    until,
    until_load,
    until_ready,
)
from tests.server.server_process import ENGINE_PROCESS, LAUNCHER, ROOT, ServerProcess, launched

pytestmark = [pytest.mark.slow, pytest.mark.ray]

logger = logging.getLogger(__name__)

COMMAND = LAUNCHER[:-2]  # without --replicas 1

TEXTS = [f"{'trio owns tasks by nurseries ' * (number % 7)}text {number}" for number in range(24)]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[ClusterProcess]:
    with ray_cluster(tmp_path, HF_HUB_OFFLINE="1") as cluster:
        yield cluster


@asynccontextmanager
async def serving(tmp_path: Path, model: Path, cluster: ClusterProcess) -> AsyncIterator[ServerProcess]:
    by_ray = ("--engine", "ray", "--replicas", "2", "--dtype", "float32")
    async with launched(tmp_path, str(model), *by_ray, command=COMMAND, env=cluster.variables) as server:
        yield server


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


async def test_ray_agrees_with_the_local_engine_and_what_dies_is_replaced(tmp_path, minilm, cluster):
    nodes = {cluster.add_node(2), cluster.add_node(2)}
    async with launched(
        tmp_path, str(minilm), "--engine", "local", "--replicas", "1", "--dtype", "float32", command=COMMAND
    ) as server:
        local = await embed(server, TEXTS)
    async with serving(tmp_path, minilm, cluster) as server, leaving_nothing(server, cluster):
        await until_ready(server, 2)
        assert np.abs(await embed(server, TEXTS) - local).max() < 1e-6
        for restarts, what in enumerate((ACTOR, ENGINE_PROCESS), start=1):
            await recover(server, restarts, cluster.processes(what)[0].kill)
        engines = cluster.processes(ENGINE_PROCESS)
        assert len({cluster.node_of(engine) for engine in engines}) == 2  # as before
        await recover(server, 3, lambda: cluster.kill_node(nodes.pop()))
        await server.wait_computing()
        assert np.abs(await embed(server, TEXTS) - local).max() < 1e-6


async def test_a_server_that_is_killed_while_models_load_leaves_nothing_on_the_nodes(tmp_path, minilm, cluster):
    cluster.add_node(2)
    by_ray = ("--engine", "ray", "--replicas", "2")
    async with launched(
        tmp_path, str(minilm), *by_ray, command=COMMAND, env=cluster.variables, wait_ready=False
    ) as server:
        await until(lambda: len(cluster.processes(ENGINE_PROCESS)) == 2)
        assert "is ready" not in server.log
        server.signal(signal.SIGKILL)
        await until(lambda: cluster.is_empty)


async def test_a_replica_without_room_waits_for_a_node_that_joins(tmp_path, minilm, cluster):
    cluster.add_node(1)
    async with serving(tmp_path, minilm, cluster) as server:  # ready with one of them
        await server.wait_logged("waits for a node")
        states = ["loading", "ready"]
        await until_load(server, lambda load: sorted(one["state"] for one in load["replicas"].values()) == states)
        cluster.add_node(1)
        await until_ready(server, 2)


def test_errors_of_ray_are_ours_and_the_handler_of_sigterm_stays(cluster):
    cluster.add_node(1)
    program = [sys.executable, "-m", "tests.ray.ray_calls_program", cluster.address]
    said = subprocess.run(program, cwd=ROOT, check=True, capture_output=True, text=True, timeout=120).stdout
    outcomes = dict(map(json.loads, said.splitlines()))
    assert outcomes.pop("node")
    assert outcomes == {
        "handler kept": True,
        "failure of a method": "EngineProcessDiedError",
        "after its end": "EngineProcessDiedError",
        "cancelled at once": True,
        "after its group": "EngineProcessDiedError",
    }
