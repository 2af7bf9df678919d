"""API processes, an engine process and engines on other machines that are killed and stopped at random, under load."""

import math
import os
import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path

import httpx
import numpy as np
import psutil
import pytest
import trio

from tests.conftest import client_of
from tests.scripted_runner import scripted_vector
from tests.server.server_process import (
    API_PROCESS,
    ENGINE_PROCESS,
    ENGINE_PROGRAM,
    ServerProcess,
    free_port,
    scripted,
    started,
    until,
)

KILLS = int(os.environ.get("RANDOM_KILLS", "10"))
"""With 150 it takes seven minutes."""

CLIENTS = 8
STOPPED_S = 2.0
LIMIT_S = 120


class Host:
    """An engine at an address that is started again whenever it ends, as systemd would."""

    def __init__(self, folder: Path, key_file: Path, number: int) -> None:
        self.address = f"127.0.0.1:{free_port()}"
        self._log_path = key_file.with_name(f"engine-{number}.log")
        self._command = [*ENGINE_PROGRAM, f"m={folder}", "--listen", self.address, "--key-file", str(key_file)]
        self.process: psutil.Process | None = None

    @asynccontextmanager
    async def kept(self) -> AsyncIterator[None]:
        async with trio.open_nursery() as nursery:
            await nursery.start(self._keep)
            yield
            nursery.cancel_scope.cancel()

    async def _keep(self, task_status: trio.TaskStatus[None]) -> None:
        while True:
            with started(self._command, 0, self._log_path, {}) as server:
                self.process = psutil.Process(server.process.pid)
                if task_status is not None:
                    await server.wait_logged("listening on")
                    task_status.started()
                    task_status = None
                await server.wait_exit(math.inf)


class Clients:
    """Each sends one request after the other, and checks every vector."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.outcomes: Counter[str] = Counter()

    async def run(self, seed: int) -> None:
        choose = random.Random(seed)
        async with client_of(self._url) as client:
            while True:
                rows = [
                    [choose.randint(20, 90) for _ in range(choose.randint(1, 9))] for _ in range(choose.randint(1, 5))
                ]
                try:
                    with trio.fail_after(LIMIT_S):
                        answer = await client.post("/v1/embeddings", json={"input": rows})
                except httpx.TransportError as error:  # the API process was killed
                    self.outcomes[type(error).__name__] += 1
                    continue
                self.outcomes[str(answer.status_code)] += 1
                if answer.status_code == 200:
                    vectors = [each["embedding"] for each in answer.json()["data"]]
                    expected = [scripted_vector(np.array(row, dtype=np.int32), len(vectors[0])) for row in rows]
                    assert np.array_equal(vectors, expected)
                else:
                    assert answer.status_code in {503, 504}, answer.text


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # httpx's generators, of cut requests
async def test_processes_are_killed_and_stopped_at_random_and_every_answer_is_right(tmp_path, scripted_folder):
    """Three API processes, an engine process and two engines of other machines."""
    key_file = tmp_path / "key"
    key_file.write_text("a key that is long enough: 0123456789")
    hosts = [Host(scripted_folder, key_file, number) for number in range(2)]
    choose = random.Random(0)
    async with AsyncExitStack() as stack:
        for host in hosts:
            await stack.enter_async_context(host.kept())
        addresses = ",".join(host.address for host in hosts)
        arguments = ["--engine", "process", "--replicas", "1", "--api-workers", "3", "--engine-hosts", addresses]
        given = (f"m={scripted_folder}", *arguments, "--key-file", str(key_file))
        server = await stack.enter_async_context(scripted(tmp_path, *given))
        clients = Clients(server.url)
        async with trio.open_nursery() as nursery:
            for seed in range(CLIENTS):
                nursery.start_soon(clients.run, seed)
            for _ in range(KILLS):
                before = clients.outcomes["200"]
                await hit(choose, choose.choice(victims(server, hosts)))
                await until(lambda before=before: clients.outcomes["200"] >= before + 10)
            nursery.cancel_scope.cancel()
        assert server.process.poll() is None
        await check_that_all_is_well(server)
        await server.drain()
    assert clients.outcomes["200"] >= 10 * KILLS


def victims(server: ServerProcess, hosts: list[Host]) -> list[psutil.Process]:
    of_hosts = [host.process for host in hosts if host.process is not None]
    return [*server.processes(API_PROCESS), *server.processes(ENGINE_PROCESS), *of_hosts]


async def hit(choose: random.Random, victim: psutil.Process) -> None:
    """Kill a process, or stop it for a moment that is longer than links wait for a sign of life."""
    with suppress(psutil.NoSuchProcess):
        if choose.random() < 2 / 3:
            victim.kill()
            return
        victim.suspend()
        await trio.sleep(STOPPED_S)
        victim.resume()


async def check_that_all_is_well(server: ServerProcess) -> None:
    await server.wait_computing()
    async with client_of(server.url) as client:
        with trio.fail_after(LIMIT_S):
            while True:
                answers = [await client.post("/v1/embeddings", json={"input": [5]}) for _ in range(20)]
                if {answer.status_code for answer in answers} == {200}:
                    return
                await trio.sleep(0.1)
