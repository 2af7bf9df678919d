"""``--renderer-backend process``: the processes come with the server, and leave with it however it ends."""

import os
import signal
import sys
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import httpx
import psutil
import pytest
import trio

from tests.conftest import client_of
from tests.models.vision_families import clip
from tests.rendering.media.images import data_url, encoded
from tests.server.server_process import LAUNCHER, ROOT, SCRIPTED, ServerProcess, hypercorned, launched

IN_PROCESSES = ("--renderer-backend", "process", "--renderer-num-workers", "2")
CONSOLE_SCRIPT = (str(Path(sys.executable).with_name("trio-pool-serve")), "serve", "--replicas", "1")
LEAVE_LIMIT_S = 20
LONG = "hello " * 1000
"""Short texts are rendered on the event loop, and several of a middling length by one worker."""


def family_of(server: ServerProcess) -> list[psutil.Process]:
    return psutil.Process(server.process.pid).children(recursive=True)


def workers_of(server: ServerProcess) -> list[psutil.Process]:
    """The processes that render; neither what multiprocessing cleans up with, nor hypercorn's worker, their parent."""
    spawned = [process for process in family_of(server) if "spawn_main" in " ".join(process.cmdline())]
    return [process for process in spawned if not process.children()]


async def left(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Who of them is still there after a while."""
    _, alive = await trio.to_thread.run_sync(lambda: psutil.wait_procs(processes, timeout=LEAVE_LIMIT_S))
    return alive


async def ask(server: ServerProcess) -> httpx.Response:
    async with client_of(server.url) as client:
        return await client.post("/v1/embeddings", json={"input": [LONG, LONG], "truncate_prompt_tokens": 8})


async def wait_borrowed(server: ServerProcess, count: int) -> None:
    async with client_of(server.url) as client:
        with trio.fail_after(60):
            while (await client.get("/load")).json()["workers"]["render"]["borrowed"] != count:  # noqa: ASYNC110
                await trio.sleep(0.01)


Start = Callable[[Path, Path, Path], AbstractAsyncContextManager[ServerProcess]]


def by_module(tmp_path: Path, minilm: Path, scripted_folder: Path) -> AbstractAsyncContextManager[ServerProcess]:
    return launched(tmp_path, str(minilm), *IN_PROCESSES, command=LAUNCHER)


def by_console_script(
    tmp_path: Path, minilm: Path, scripted_folder: Path
) -> AbstractAsyncContextManager[ServerProcess]:
    return launched(tmp_path, str(minilm), *IN_PROCESSES, command=CONSOLE_SCRIPT, env={"PYTHONPATH": str(ROOT)})


def by_hypercorn(tmp_path: Path, minilm: Path, scripted_folder: Path) -> AbstractAsyncContextManager[ServerProcess]:
    env = {
        "TRIO_POOL_SERVE_MODEL": str(scripted_folder),
        "TRIO_POOL_SERVE_RENDERER_BACKEND": "process",
        "TRIO_POOL_SERVE_RENDERER_NUM_WORKERS": "2",
    }
    return hypercorned(tmp_path, "tests.server.programs.scripted_asgi:app", env=env)


@pytest.mark.parametrize("start", [by_module, by_console_script, by_hypercorn])
async def test_however_a_server_is_started_it_has_its_processes_once_and_takes_them_along(
    tmp_path: Path, minilm: Path, scripted_folder: Path, start: Start
):
    async with start(tmp_path, minilm, scripted_folder) as server:
        family = family_of(server)
        workers = workers_of(server)
        assert len(workers) == 2
        assert (await ask(server)).status_code == 200
        assert workers_of(server) == workers, "nobody had to start another"
        listening = {connection.laddr.port for process in workers for connection in process.net_connections()}
        assert listening == set()
        server.signal(signal.SIGTERM)
        assert await server.wait_exit() == 0
        assert await left(family) == []
        assert server.log.count("loaded in") + server.log.count("is ready: ") == 1
        assert "Traceback" not in server.log


async def test_a_model_that_reads_images_has_processes_for_them_before_the_first(tmp_path: Path):
    folder = clip(tmp_path / "model")
    arguments = (str(folder), *IN_PROCESSES, "--media-num-workers", "1")
    async with launched(tmp_path, *arguments, command=SCRIPTED) as server:
        workers = workers_of(server)
        assert len(workers) == 3
        body = {"input": [{"image": data_url(encoded())}]}
        async with client_of(server.url) as client:
            answer = await client.post("/v1/embeddings", json=body)
        assert answer.status_code == 200, answer.text
        assert workers_of(server) == workers, "nobody had to start another"


async def test_signals_for_the_whole_group_are_the_servers_alone(tmp_path: Path, scripted_folder: Path):
    """Ctrl-C in a terminal is for all of them, and so is what some service managers send."""
    async with launched(tmp_path, str(scripted_folder), *IN_PROCESSES, command=SCRIPTED) as server:
        assert (await ask(server)).status_code == 200
        family = family_of(server)
        for process in family:
            process.send_signal(signal.SIGINT)
            process.send_signal(signal.SIGTERM)
        assert (await ask(server)).status_code == 200, "those that render wait for the server"
        server.signal(signal.SIGINT)
        assert await server.wait_exit() == 0
        assert await left(family) == []
        assert "Traceback" not in server.log


async def test_processes_whose_server_is_killed_leave_by_themselves(tmp_path: Path, scripted_folder: Path):
    async with launched(tmp_path, str(scripted_folder), *IN_PROCESSES, command=SCRIPTED) as server:
        family = family_of(server)
        server.signal(signal.SIGKILL)
        await server.wait_exit()
        assert await left(family) == []
        assert "Traceback" not in server.log


async def test_a_process_that_is_killed_fails_its_request_and_is_replaced(tmp_path: Path, scripted_folder: Path):
    async with launched(tmp_path, str(scripted_folder), *IN_PROCESSES, command=SCRIPTED) as server:
        before = workers_of(server)
        for worker in before:
            worker.suspend()
        answers: list[httpx.Response] = []

        async def client() -> None:
            answers.append(await ask(server))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(client)
            await wait_borrowed(server, 2)
            for worker in before:
                os.kill(worker.pid, signal.SIGKILL)
        assert answers[0].status_code == 500
        assert "The process that did the work has died." in answers[0].json()["error"]["message"]
        await wait_borrowed(server, 0)
        after = workers_of(server)
        assert len(after) == 2
        assert not set(after) & set(before)
        assert (await ask(server)).status_code == 200
        assert workers_of(server) == after
