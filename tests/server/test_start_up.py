"""What a start shows: phases, addresses and a request to copy on a terminal, and JSON lines alone elsewhere."""

import errno
import json
import logging
import os
import re
import shlex
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil
import pytest
import trio
from attrs import evolve

from tests.lanes import sampled
from tests.models.static_families import STATIC
from tests.server.server_process import ENGINE_PROCESS, free_port, launched
from tests.server.terminal import CODES, Terminal, in_terminal
from trio_pool_serve import __version__
from trio_pool_serve.config import Config, NetworkConfig
from trio_pool_serve.models.folder import read_model_folder
from trio_pool_serve.server.announcement import NO_KEY, announce, example_request
from trio_pool_serve.server.listening_socket import open_listening_socket, why_not_listening

SERVE = (sys.executable, "-m", "trio_pool_serve", "serve")

CONVERSION = (
    "Importing packages", "Loading m", "Loading m: importing torch", "Loading m: loading the weights",
    "Loading m: converting for OpenVINO", "Loading m: comparing OpenVINO with torch",
)  # fmt: skip
"""Phases of a model's first start, in order."""


@pytest.fixture
def static_folder(tmp_path: Path) -> Path:
    """A model that needs neither torch nor a conversion."""
    return STATIC["potion"](tmp_path / "potion")


def require_order(seen: Sequence[str], *beginnings: str) -> None:
    """Require lines with these beginnings, in this order, perhaps with others in between."""
    left = iter(seen)
    for beginning in beginnings:
        assert any(line.startswith(beginning) for line in left), (beginning, seen)


async def answer_of(terminal: Terminal) -> Any:
    """Return the response to the request that was printed."""
    (command,) = re.findall(r"^ +(curl [^\r\n]+)", terminal.raw, re.M)
    finished = await trio.run_process(shlex.split(command), capture_stdout=True)
    return json.loads(finished.stdout)


def ready_lines(port: int, name: str) -> tuple[str, ...]:
    url = f"http://127.0.0.1:{port}"
    return (
        f"ready  trio-pool-serve {__version__} on {url}", f"Console   {url}/console", f"API docs  {url}/docs",
        f"Model     {name}: ", "Try:", f"curl -sS {url}/v1/embeddings ",
    )  # fmt: skip


async def test_a_terminal_shows_phases_then_addresses_the_model_and_a_request_that_works(static_folder, tmp_path):
    port = free_port()
    command = (*SERVE, f"m={static_folder}", "--port", str(port))
    async with in_terminal(command, {"XDG_STATE_HOME": str(tmp_path / "state")}) as terminal:
        await terminal.wait_seen("curl ")
        assert (await answer_of(terminal))["data"][0]["embedding"]
        terminal.interrupt()
        assert await terminal.wait_exit() == 0
    require_order(terminal.seen, "Importing packages", *ready_lines(port, "m"))
    (model,) = [line for line in terminal.seen if line.startswith("Model")]
    assert "float32 on cpu" in model
    assert "by NumPy" in model
    assert NO_KEY not in terminal.raw
    assert "\x1b[?25l" not in terminal.raw, "the cursor is never hidden"


@pytest.mark.slow
@pytest.mark.parametrize("flags", [(), ("--api-workers", "2", "--replicas", "1")], ids=["alone", "workers"])
async def test_a_terminal_shows_each_step_of_a_conversion(minilm: Path, tmp_path: Path, flags):
    port = free_port()
    command = (*SERVE, f"m={minilm}", "--port", str(port), "--host", "0.0.0.0", *flags)
    async with in_terminal(command, {"XDG_CACHE_HOME": str(tmp_path)}) as terminal:
        await terminal.wait_seen(NO_KEY)
        assert len((await answer_of(terminal))["data"][0]["embedding"]) == 384
        terminal.interrupt()
        assert await terminal.wait_exit() == 0
    (ready, *others) = ready_lines(port, "m")
    require_order(terminal.seen, *CONVERSION, ready.replace("127.0.0.1", "0.0.0.0"), *others, NO_KEY)
    (model,) = [line for line in terminal.seen if line.startswith("Model")]
    # How many times as fast it is, is not said if other programs kept the cores busy while it was tried.
    assert re.search(r"(bfloat16|float32) on cpu \(auto: .*by (OpenVINO( \(.+\))?|torch \(.+\))", model)
    assert "%|" not in terminal.raw, "no library printed a progress bar"


async def log_of(tmp_path: Path, *arguments: str | Path, env: dict[str, str] | None = None) -> list[dict[str, Any]]:
    """Return the log of a server that was started without a terminal, and ended."""
    async with launched(tmp_path, *arguments, command=SERVE, env=env) as server:
        await server.drain()
    return [json.loads(line) for line in server.log.splitlines()]


async def test_without_a_terminal_every_line_is_json(static_folder, tmp_path):
    log = await log_of(tmp_path, f"m={static_folder}", "--host", "0.0.0.0")
    (ready,) = [line for line in log if line["message"] == "ready"]
    assert (ready["models"], ready["version"]) == (["m"], __version__)
    assert ready["url"].startswith("http://0.0.0.0:")
    (warned,) = [line for line in log if line["level"] == "WARNING"]
    assert warned["message"] == NO_KEY
    require_order([line["message"] for line in log], "loading m", "loaded in", "ready", "SIGTERM", "draining")


@pytest.mark.slow
@pytest.mark.parametrize("flags", [("--backend", "torch"), ("--dtype", "int8", "--api-workers", "2")])
async def test_without_a_terminal_libraries_print_nothing_between_json_lines(minilm: Path, tmp_path: Path, flags):
    log = await log_of(tmp_path, f"m={minilm}", "--replicas", "1", *flags, env={"XDG_CACHE_HOME": str(tmp_path)})
    assert "ready" in [line["message"] for line in log]


@sampled(
    ("shown", "workers"),
    [*zip(CONVERSION, "121212", strict=True)],
    keep=[("Importing packages", "1"), ("Loading m: importing torch", "1")],
)
async def test_ctrl_c_during_a_start_is_silent_and_the_status_is_0(minilm: Path, tmp_path: Path, shown, workers):
    command = (*SERVE, f"m={minilm}", "--port", str(free_port()), "--api-workers", workers, "--replicas", "1")
    async with in_terminal(command, {"XDG_CACHE_HOME": str(tmp_path)}) as terminal:
        await terminal.wait_seen(shown)
        terminal.interrupt()
        assert await terminal.wait_exit() == 0
    after = terminal.raw.rpartition("^C")[2]
    lines = [line for line in after.replace("\r\n\r\x1b[1A", "").split("\n") if line.strip()]
    assert len(lines) == 1, "the line of the display alone, which is removed"
    assert after.endswith("\x1b[2K")
    assert not re.search("Traceback|Error|INFO|WARNING", terminal.raw)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("after_s", "number"),
    [*zip([0.2, 0.6, 1.0, 2.0, 4.0, 6.0], [signal.SIGINT, signal.SIGTERM] * 3, strict=True)],
)
async def test_a_signal_during_a_start_without_a_terminal_leaves_json_lines(minilm, tmp_path, after_s, number):
    flags = ("--api-workers", "2", "--replicas", "1")
    env = {"XDG_CACHE_HOME": str(tmp_path)}
    async with launched(tmp_path, f"m={minilm}", *flags, command=SERVE, env=env, wait_ready=False) as server:
        await trio.sleep(after_s)
        server.signal(number)
        assert await server.wait_exit() == 0
    for line in server.log.splitlines():
        assert json.loads(line)["level"] == "INFO"


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """A folder whose path is short enough for sockets in it."""
    with TemporaryDirectory() as name:
        yield Path(name)


@pytest.mark.slow
async def test_a_server_that_ends_while_a_model_is_compiled_leaves_no_temporary_files(minilm, tmp_path, short_folder):
    flags = ("--backend", "compile", "--cache-dir", "", "--replicas", "2")
    env = {"TMPDIR": str(short_folder)}
    async with launched(tmp_path, f"m={minilm}", *flags, command=SERVE, env=env) as server:
        await server.wait_logged("is being compiled", times=2)
        assert [*short_folder.glob("trio_pool_serve-*/trio_pool_serve.*")]
        await server.drain()
    assert [*short_folder.iterdir()] == []


# -- addresses -------------------------------------------------------------------------------------------


async def test_a_port_that_is_in_use_is_named_with_the_flag_that_helps(static_folder, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        arguments = (*SERVE, static_folder, "--port", str(port))
        finished = await trio.run_process(arguments, capture_stderr=True, check=False)
        async with in_terminal(arguments, {}) as terminal:
            assert await terminal.wait_exit() == 1
    assert finished.returncode == 1
    (logged,) = map(json.loads, finished.stderr.splitlines())
    assert (logged["level"], logged["message"]) == ("CRITICAL", f"Port {port} is in use; try another --port.")
    assert terminal.seen[-1] == f"trio-pool-serve: Port {port} is in use; try another --port."


async def test_a_model_that_cannot_be_loaded_is_named_in_one_line(tmp_path):
    arguments = (*SERVE, f"m={tmp_path}/none", "--port", str(free_port()))
    async with in_terminal(arguments, {}) as terminal:
        assert await terminal.wait_exit() == 1
    lines = [line for line in CODES.sub("", terminal.raw.replace("\x1b[2K", "\n")).splitlines() if "none" in line]
    assert lines[-1].startswith("trio-pool-serve: m cannot be loaded: ")
    assert not [line for line in lines if "Error(" in line]


@pytest.mark.parametrize(
    ("network", "error", "said"),
    [
        (NetworkConfig(port=80), PermissionError(errno.EACCES, "denied"),
         "No permission to listen on port 80; try a --port from 1024 on."),
        (NetworkConfig(host="192.0.2.1"), OSError(errno.EADDRNOTAVAIL, "not there"),
         "--host 192.0.2.1 is no address of this machine."),
        (NetworkConfig(host="no.such.host"), socket.gaierror(socket.EAI_NONAME, "Name or service not known"),
         "--host no.such.host is unknown: Name or service not known."),
        (NetworkConfig(host="unix:/x/y"), FileNotFoundError(errno.ENOENT, "No such file or directory"),
         "--host unix:/x/y: No such file or directory."),
        (NetworkConfig(host="unix:/x/y"), OSError(errno.EADDRINUSE, "Address already in use"),
         "--host unix:/x/y: in use by another server, or a file."),
        (NetworkConfig(port=81), OSError(errno.ENOBUFS, "No buffer space available"),
         "Cannot listen on 127.0.0.1, port 81: No buffer space available."),
    ],
)  # fmt: skip
def test_a_server_that_cannot_listen_says_why(network: NetworkConfig, error: OSError, said: str):
    assert why_not_listening(error, network) == said


def test_an_unknown_host_and_a_foreign_address_are_named(tmp_path: Path):
    for host, said in (
        ("no-such-host.invalid", "--host no-such-host.invalid is unknown: "),
        ("192.0.2.1", "--host 192.0.2.1 is no address of this machine."),
        (f"unix:{tmp_path}/none/socket", f"--host unix:{tmp_path}/none/socket: No such file or directory."),
    ):
        with pytest.raises(OSError, match="--host") as raised:
            open_listening_socket(NetworkConfig(host=host, port=0))
        assert str(raised.value).startswith(said)


@pytest.mark.parametrize(
    ("url", "network", "request_line"),
    [
        ("http://127.0.0.1:8000", {}, "curl -sS http://127.0.0.1:8000/v1/embeddings -H"),
        ("https://[::1]:8000", {"api_key": "secret"}, "-H 'Authorization: Bearer KEY' -d"),
        ("unix:/run/s", {"host": "unix:/run/s"}, "curl -sS --unix-socket /run/s http://localhost/v1/embeddings -H"),
    ],
)
def test_the_request_fits_the_address_and_the_keys(scripted_folder, url, network, request_line):
    config = Config(models=(str(scripted_folder),), network=NetworkConfig(**network))
    line = example_request(config, read_model_folder(scripted_folder), url)
    assert request_line in line
    assert "secret" not in line


@pytest.mark.parametrize(
    ("url", "network", "is_warned"),
    [
        ("http://0.0.0.0:8000", {}, True),
        ("http://[::]:8000", {}, True),
        ("http://192.0.2.1:8000", {}, True),
        ("http://192.0.2.1:8000", {"api_key": "secret"}, False),
        ("https://192.0.2.1:8000", {"ssl_certfile": Path("c"), "ssl_ca_certs": Path("a")}, False),
        ("http://127.0.0.1:8000", {}, False),
        ("http://[::1]:8000", {}, False),
        ("unix:/run/s", {"host": "unix:/run/s"}, False),
    ],
)
@pytest.mark.parametrize("log_format", ["text", "json"])
def test_a_server_without_keys_that_others_can_reach_is_warned_of(
    scripted_folder, caplog, capfd, url, network, is_warned, log_format
):
    config = Config(models=(str(scripted_folder),), network=NetworkConfig(**network))
    config = evolve(config, logging=evolve(config.logging, log_format=log_format))
    caplog.set_level(logging.INFO)
    announce(config, read_model_folder(scripted_folder), url, {})
    assert (NO_KEY in caplog.text + capfd.readouterr().err) is is_warned


@sampled("closed", ["<&- >&- 2>&-", ">&-", "2>&-"], keep=["<&- >&- 2>&-"])
async def test_a_server_whose_standard_files_are_closed_serves_and_drains(static_folder, tmp_path, closed):
    command = ("sh", "-c", f'exec "$@" {closed}', "sh", *SERVE, "--engine", "process", f"m={static_folder}")
    async with launched(tmp_path, command=command) as server:
        answer = await server.post({"input": "hello"})
        assert answer.status_code == 200
        for process in (psutil.Process(server.process.pid), *server.processes(ENGINE_PROCESS)):
            for number in range(3):
                assert not Path(f"/proc/{process.pid}/fd/{number}").is_socket()  # noqa: ASYNC240
        await server.drain()
    assert "Traceback" not in server.log


async def test_signals_of_others_do_not_end_a_server(static_folder, tmp_path):
    flags = ("--engine", "process", "--api-workers", "2", f"m={static_folder}")
    async with launched(tmp_path, *flags, command=SERVE) as server:
        await server.wait_joined(2)
        processes = [psutil.Process(server.process.pid), *server.family()]
        for process in processes:
            for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM):
                process.send_signal(number)
        assert (await server.post({"input": "hello"})).status_code == 200
        assert [psutil.Process(server.process.pid), *server.family()] == processes
        await server.drain()


NOT_UTF_8 = os.fsdecode(b"m\xff")


@sampled(
    ("arguments", "env"),
    [
        ((NOT_UTF_8,), {}),
        (("--served-model-name", NOT_UTF_8), {}),
        (("--data-dir", NOT_UTF_8), {}),
        ((), {"TRIO_POOL_SERVE_MODEL": NOT_UTF_8}),
    ],
    keep=[((), {"TRIO_POOL_SERVE_MODEL": NOT_UTF_8})],
    ids=str,
)
async def test_a_name_or_path_that_is_not_utf_8_is_said_in_one_sentence(arguments, env):
    ended = await trio.run_process([*SERVE, *arguments], env={**os.environ, **env}, capture_stderr=True, check=False)
    assert ended.returncode == 2
    (line,) = ended.stderr.decode().splitlines()
    assert re.fullmatch(
        r"trio-pool-serve: (argument [12]|TRIO_POOL_SERVE_MODEL) is not UTF-8; names and paths have to be\.", line
    )
