"""Servers whose standard error nobody reads, or whose disk is full: they serve, and end when they are told to."""

import json
import os
import signal
import sys
from contextlib import aclosing

import httpx
import pytest
import trio

from tests.conftest import client_of
from tests.lanes import sampled
from tests.server.programs import script
from tests.server.server_process import ENGINE_PROCESS, free_port, launched, scripted, started
from tests.unwritable_files import PIPE_BYTES, closed_pipe, full_disk, small_pipe, unread_pipe

LIMIT_S = 60


async def fill(client: httpx.AsyncClient, token: int = 7) -> int:
    """Send requests whose log lines are far more than a small pipe takes; return how many."""
    count = 10 * PIPE_BYTES // 300
    for _ in range(count):
        answer = await client.post("/v1/embeddings", json={"input": [token]})
        assert answer.status_code == (500 if token == script.RAISES else 200), answer.text
    return count


async def test_a_server_whose_log_nobody_reads_answers_and_ends_and_the_log_lacks_nothing_once_it_is_read(
    tmp_path, scripted_folder
):
    """The pipe is full after a dozen requests."""
    unread, stderr = small_pipe()
    flags = ("--access-log", "--plugins", "tests.server.programs.whole_log")
    async with scripted(tmp_path, scripted_folder, *flags, stderr=stderr) as server:
        os.close(stderr)
        with trio.fail_after(LIMIT_S):
            async with client_of(server.url) as client:
                sent = await fill(client)
                assert (await client.get("/livez")).status_code == 200
                async with aclosing(trio.lowlevel.FdStream(unread)) as log:
                    lines = b""
                    while lines.count(b'"/v1/embeddings"') < sent:
                        lines += await log.receive_some()
                    for line in lines.splitlines()[:-1]:
                        assert json.loads(line)
                await fill(client)  # by now nobody is there to read
                assert 'log_lines{of="dropped"} 0.0' not in (await client.get("/metrics")).text
            await server.drain()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "token"),
    [
        (("--engine", "process"), script.RAISES),
        (("--api-workers", "2", "--access-log"), 7),
        (("--access-log", "--log-format", "text"), 7),
    ],
)
async def test_no_process_of_a_server_waits_until_its_log_is_read(tmp_path, scripted_folder, flags, token):
    """Failed requests are logged without ``--access-log``, by the API process and by the engine process."""
    with unread_pipe() as stderr:
        async with scripted(tmp_path, scripted_folder, *flags, stderr=stderr) as server:
            with trio.fail_after(LIMIT_S):
                async with client_of(server.url) as client:
                    await fill(client, token)
                    for path in ("/livez", "/metrics", "/load"):
                        assert (await client.get(path)).status_code == 200
                    assert (await client.post("/v1/embeddings", json={"input": [7]})).status_code == 200
                await server.drain()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "open_stderr"), [("local", full_disk), ("process", unread_pipe), ("process", closed_pipe)]
)
async def test_a_model_is_loaded_whatever_becomes_of_the_progress_that_libraries_show(
    tmp_path, minilm, engine, open_stderr
):
    """transformers writes its loading bars to standard error, in an engine that is started again, too."""
    with open_stderr() as stderr:
        async with launched(tmp_path, str(minilm), "--engine", engine, stderr=stderr) as server:
            async with client_of(server.url) as client:
                assert (await client.post("/v1/embeddings", json={"input": "hello"})).status_code == 200
            if engine == "process":
                (first,) = server.processes(ENGINE_PROCESS)
                first.kill()
                await server.wait_until("/readyz", 503)
                await server.wait_until("/readyz")
                await server.wait_computing()
            server.signal()
            assert await server.wait_exit(LIMIT_S) == 0


@sampled("number", [signal.SIGTERM, signal.SIGINT], keep=[])
@pytest.mark.parametrize("command", ["serve", "engine"])
async def test_a_signal_while_modules_are_imported_ends_the_process_with_0(tmp_path, scripted_folder, command, number):
    """A plugin is the first of them; it never ends."""
    os.mkfifo(tmp_path / "importing")
    (tmp_path / "endless_plugin.py").write_text(
        f"import signal\nopen({str(tmp_path / 'importing')!r}, 'w').close()\nwhile True: signal.pause()\n"
    )
    at = {"serve": ["--port", str(free_port())], "engine": ["--listen", f"127.0.0.1:{free_port()}", "--key-file", "k"]}
    full = [sys.executable, "-m", "trio_pool_serve", command, str(scripted_folder), *at[command]]
    env = {"PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    with started([*full, "--plugins", "endless_plugin"], 0, tmp_path / "server.log", env) as server:
        await trio.to_thread.run_sync((tmp_path / "importing").read_bytes, abandon_on_cancel=True)
        server.signal(number)
        assert await server.wait_exit(LIMIT_S) == 0
