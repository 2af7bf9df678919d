"""A server on a machine with eight GPUs, as far as its ``nvidia-smi`` goes: real processes, ended by real signals."""

import json
import os
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import trio

from tests.fake_nvidia_smi import EIGHT, LABELS, printing, write_nvidia_smi
from tests.pipes import read, write
from tests.server.programs import script
from tests.server.server_process import ServerProcess, scripted

VISIBLE = "6,1"


@pytest.fixture
def root(pipes: Path) -> Path:
    write_nvidia_smi(pipes / "bin", printing(EIGHT))
    return pipes


@asynccontextmanager
async def served(
    root: Path, folder: Path, *arguments: str, device: str = "cuda", visible: str | None = None, **variables: str
):
    env = {
        "PATH": f"{root / 'bin'}:{os.environ['PATH']}",
        **({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}),
        **variables,
    }
    options = ("--engine", "process", "--device", device, *arguments)
    async with scripted(root, f"m={folder}", *options, env=env) as server:
        yield server


@asynccontextmanager
async def two_ready(root: Path, folder: Path, *arguments: str, **variables: str) -> AsyncIterator[ServerProcess]:
    """A server whose two visible GPUs both have a replica that is ready."""
    async with served(root, folder, *arguments, visible=VISIBLE, **variables) as server:
        await server.wait_logged("is ready", times=2)
        with trio.fail_after(60):  # the API process learns it a moment later
            while {replica["state"] for replica in (await replicas_of(server)).values()} != {"ready"}:  # noqa: ASYNC110
                await trio.sleep(0.02)
        yield server


async def text_of(server: ServerProcess, path: str) -> str:
    return (await server.get(path)).text


async def replicas_of(server: ServerProcess, model: str = "m") -> dict[str, dict[str, Any]]:
    return json.loads(await text_of(server, "/load"))["models"][model]["replicas"]


async def until_some(server: ServerProcess, condition: Callable[[dict[str, Any]], bool]) -> str:
    """Wait until a replica is so, and return its number."""
    with trio.fail_after(60):
        while True:
            for number, replica in (await replicas_of(server)).items():
                if condition(replica):
                    return number
            await trio.sleep(0.02)


async def until_state(server: ServerProcess, number: str, state: str) -> None:
    assert await until_some(server, lambda replica: replica["state"] == state) == number


def process_of(server: ServerProcess, replica: str) -> psutil.Process:
    """Return the engine process of a replica: the last that was logged as ready."""
    (*_, pid) = re.findall(rf"engine process (\d+) is ready: m, replica {replica} on", server.log)
    return psutil.Process(int(pid))


async def kill_until_failed(server: ServerProcess, replica: str, *, meanwhile: Callable) -> None:
    """Kill a replica's process twice, with one restart allowed."""
    ready = server.log.count("is ready")
    process_of(server, replica).kill()
    await server.wait_logged("is ready", times=ready + 1)
    await meanwhile()
    process_of(server, replica).kill()


@pytest.mark.slow
@pytest.mark.parametrize("workers", ["1", "2"])
async def test_a_gpu_whose_replica_keeps_dying_takes_nothing_else_with_it(root, scripted_folder, workers):
    async with two_ready(root, scripted_folder, "--api-workers", workers, SCRIPT_MAX_RESTARTS="1") as server:
        async with server.waiting_request(root) as waiting:
            dying = await until_some(server, lambda replica: replica.get("in_flight_batches", 0) > 0)
            label = LABELS[int(VISIBLE.split(",")[int(dying)])]

            async def other_answers() -> None:
                await read(root / "launched")
                await write(root / "go", "go")
                await server.ask_well(5)

            await kill_until_failed(server, dying, meanwhile=other_answers)
        assert [answer.status_code for answer in waiting] == [200]
        await until_state(server, dying, "failed")
        for number in range(20):
            await server.ask_well(5, number)
        assert (await server.get("/readyz")).status_code == 200
        assert f"m, replica {dying} on {label} failed, leaving 1 of 2 replicas" in server.log
        assert "the next attempt is in 300 s" in server.log

        load = await text_of(server, "/load")
        assert f'"{dying}":{{"device":"{label}","state":"failed","restarts":1}}' in load.replace(" ", "")
        assert json.loads(load)["models"]["m"]["state"] == "ready"
        metrics = (await text_of(server, "/metrics")).splitlines()
        (failed,) = (line for line in metrics if 'of="failed"' in line and f'replica="{dying}"' in line)
        assert failed == f'trio_pool_serve_replica{{device="{label}",model="m",of="failed",replica="{dying}"}} 1.0'

        left = str(1 - int(dying))
        await kill_until_failed(server, left, meanwhile=server.wait_computing)
        assert await server.wait_exit() == 1
        last = server.log.splitlines()[-1]
        assert "restarted 1 times in a row: giving up" in last
        assert f"replica {left} on" in last


@pytest.mark.slow
async def test_replicas_are_told_apart_and_added_up(root, scripted_folder):
    async with two_ready(root, scripted_folder) as server:
        for number in range(10):
            await server.ask_well(5, number)
        assert (await server.ask(script.RAISES)).status_code == 500
        metrics = (await text_of(server, "/metrics")).splitlines()

        def values(name: str, *labels: str) -> dict[str, float]:
            lines = (line.rpartition(" ") for line in metrics if line.startswith(name + "{"))
            return {key: float(value) for key, _, value in lines if all(label in key for label in labels)}

        (total,) = values("trio_pool_serve_tokens_total").values()
        of_replicas = values("trio_pool_serve_replica_tokens_total")
        assert sum(of_replicas.values()) == total > 20
        assert set(of_replicas) == {
            f'trio_pool_serve_replica_tokens_total{{device="{LABELS[gpu]}",model="m",replica="{number}"}}'
            for number, gpu in enumerate((6, 1))
        }
        assert [*values("trio_pool_serve_engine", 'of="ready"').values()] == [2]
        assert [*values("trio_pool_serve_replica", 'of="ready"').values()] == [1, 1]
        assert sorted(values("trio_pool_serve_replica_faults_total", 'of="failed_rows"').values()) == [0, 1]
        load = json.loads(await text_of(server, "/load"))["models"]["m"]
        assert load["batches"] == sum(replica["batches"] for replica in load["replicas"].values()) == 10
        events = [json.loads(line) for line in server.log.splitlines() if line.startswith("{")]
        (failure,) = (event for event in events if "batch" in event["message"] and event["level"] == "ERROR")
        assert failure["model"] == "m"
        assert failure["device"] == LABELS[(6, 1)[int(failure["replica"])]]


@pytest.mark.slow
async def test_a_replica_that_says_nothing_is_stalled(root, scripted_folder):
    """After a second; half a second later its link is lost, and it is replaced."""
    async with two_ready(root, scripted_folder, "--batch-timeout-s", "10") as server:
        with trio.fail_after(60):
            while (replicas := await replicas_of(server))["1"]["state"] != "stalled":
                with suppress(psutil.NoSuchProcess):  # the stall was too short to be seen
                    process_of(server, "1").suspend()
        assert replicas["0"]["state"] == "ready"
        with suppress(psutil.NoSuchProcess):
            process_of(server, "1").resume()
        with trio.fail_after(60):
            while "stalled" in await text_of(server, "/load"):
                await trio.lowlevel.checkpoint()
