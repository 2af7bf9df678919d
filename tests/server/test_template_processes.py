"""Processes that render chat templates: started by the first conversation, gone with the server."""

import signal
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import psutil
import pytest
import trio

from tests.server.server_process import SCRIPTED_ASGI, ServerProcess, hypercorned, scripted

LEAVE_LIMIT_S = 20
CONVERSATION = {"messages": [{"role": "user", "content": "hello"}], "chat_template": "{{ messages[0].content }}"}


def workers_of(server: ServerProcess) -> list[psutil.Process]:
    """The processes that render; neither what multiprocessing cleans up with, nor hypercorn's worker, their parent."""
    spawned = [process for process in server.family() if "spawn_main" in " ".join(process.cmdline())]
    return [process for process in spawned if not process.children()]


async def left(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Those that are still there after a while."""
    _, alive = await trio.to_thread.run_sync(lambda: psutil.wait_procs(processes, timeout=LEAVE_LIMIT_S))
    return alive


def by_launcher(tmp_path: Path, folder: Path) -> AbstractAsyncContextManager[ServerProcess]:
    return scripted(tmp_path, folder, "--trust-request-chat-template")


def by_hypercorn(tmp_path: Path, folder: Path) -> AbstractAsyncContextManager[ServerProcess]:
    env = {"TRIO_POOL_SERVE_MODEL": str(folder), "TRIO_POOL_SERVE_TRUST_REQUEST_CHAT_TEMPLATE": "true"}
    return hypercorned(tmp_path, SCRIPTED_ASGI, env=env)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("start", "end"), [(by_launcher, signal.SIGTERM), (by_hypercorn, signal.SIGTERM), (by_launcher, signal.SIGKILL)]
)
async def test_they_outlive_signals_for_the_whole_group_and_leave_with_the_server(
    tmp_path: Path, scripted_folder: Path, start, end: signal.Signals
):
    """Ctrl-C in a terminal is for all processes of the group, and so is what some service managers send."""
    async with start(tmp_path, scripted_folder) as server:
        assert (await server.post(CONVERSATION)).status_code == 200
        family, workers = server.family(), workers_of(server)
        assert len(workers) == 1
        assert not workers[0].net_connections(), "it inherited no listening socket"
        for number in (signal.SIGINT, signal.SIGTERM):
            workers[0].send_signal(number)
        assert (await server.post(CONVERSATION)).status_code == 200
        assert workers_of(server) == workers, "the same process rendered both"
        server.signal(end)
        assert await server.wait_exit() == (0 if end is signal.SIGTERM else -end)
        assert await left(family) == []
        assert "Traceback" not in server.log
