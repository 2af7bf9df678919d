"""A server that systemd starts: a real datagram socket for notifications, and a listening socket that is passed."""

import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import pytest
import trio

from tests.debian_programs import debian_program
from tests.server.server_process import ROOT, SCRIPTED, scripted, started
from trio_pool_serve.server.systemd import feed_watchdog, notify, take_passed_socket
from trio_pool_serve.telemetry.snapshots import Snapshot

EXECUTE = "import os, sys; os.dup2(int(sys.argv[1]), 3); os.environ['LISTEN_PID'] = str(os.getpid()); \
os.environ['LISTEN_FDS'] = '1'; os.execv(sys.executable, [sys.executable, *sys.argv[2:]])"
"""Passes a socket as systemd does: as file descriptor 3 of the process that the variable names."""


@contextmanager
def notifications(address: str) -> Iterator[trio.socket.SocketType]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as bound:
        bound.bind(address)
        bound.setblocking(False)
        yield trio.socket.from_stdlib_socket(bound)


async def next_of(received: trio.socket.SocketType) -> list[str]:
    with trio.fail_after(60):
        return (await received.recv(1000)).decode().splitlines()


@pytest.mark.slow
@pytest.mark.parametrize("workers", ["1", "2"])
async def test_systemd_is_told_how_far_the_server_is_and_its_watchdog_is_fed(tmp_path, scripted_folder, workers):
    address = str(tmp_path / "notify")
    env = {"NOTIFY_SOCKET": address, "WATCHDOG_USEC": "20000"}
    arguments = (str(scripted_folder), "--api-workers", workers, "--replicas", "1")
    with notifications(address) as received:
        async with scripted(tmp_path, *arguments, env=env, wait_ready=False) as server:
            assert await next_of(received) == ["STATUS=loading models"]
            ready = await next_of(received)
            assert ready[0] == "READY=1"
            assert server.url in ready[1]
            for _ in range(3):
                assert await next_of(received) == ["WATCHDOG=1"]
            assert (await server.get("/readyz")).status_code == 200
            server.signal()
            while (said := await next_of(received)) == ["WATCHDOG=1"]:
                continue
            assert said == ["STOPPING=1", "STATUS=draining"]
            assert await server.wait_exit() == 0


async def test_a_passed_socket_is_served_and_its_file_stays(tmp_path: Path, scripted_folder: Path):
    path = tmp_path / "passed"
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
        listening.listen()
        command = [sys.executable, "-c", EXECUTE, str(listening.fileno()), *SCRIPTED[1:], str(scripted_folder)]
        async with httpx.AsyncClient(transport=httpx.AsyncHTTPTransport(uds=str(path)), timeout=60) as client:
            with started(command, 0, tmp_path / "server.log", {}, pass_fds=[listening.fileno()]) as server:
                await server.wait_logged("ready")
                assert (await client.get("http://x/readyz")).status_code == 200
                await server.drain()
    assert path.exists()


def test_several_passed_sockets_are_refused_and_another_process_s_are_left_alone(monkeypatch):
    monkeypatch.setenv("LISTEN_PID", str(os.getpid() + 1))
    monkeypatch.setenv("LISTEN_FDS", "1")
    assert take_passed_socket() is None
    monkeypatch.setenv("LISTEN_PID", str(os.getpid()))
    monkeypatch.setenv("LISTEN_FDS", "2")
    with pytest.raises(OSError, match="2 sockets"):
        take_passed_socket()


async def test_an_abstract_address_is_found(monkeypatch):
    name = f"trio_pool_serve-{os.getpid()}"
    monkeypatch.setenv("NOTIFY_SOCKET", f"@{name}")
    with notifications(f"\0{name}") as received:
        notify("READY=1", "STATUS=here")
        assert await next_of(received) == ["READY=1", "STATUS=here"]


async def test_the_watchdog_is_fed_unless_a_batch_does_not_end_or_no_process_answers(
    tmp_path, monkeypatch, autojump_clock
):
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
    monkeypatch.setenv("WATCHDOG_USEC", "10000000")
    first, ages = trio.current_time(), [[0.0, 9.0], [0.0, 21.0], [], [0.0], [None]]

    async def gather() -> list[Snapshot]:
        now = ages[round((trio.current_time() - first) / 5)]
        loads = ({} if age_s is None else {"models": {"m": {"oldest_in_flight_s": age_s}}} for age_s in now)
        return [Snapshot([], load) for load in loads]

    with notifications(str(tmp_path / "notify")) as received:
        with trio.move_on_after(24):
            await feed_watchdog(gather, 10)
        fed = 0
        with suppress(BlockingIOError):
            while received._sock.recv(100) == b"WATCHDOG=1":
                fed += 1
    assert fed == 2


SYSTEMD_PAGE = (ROOT / "docs" / "systemd.md").read_text()


def test_the_steps_of_the_documentation_lead_to_the_files_that_the_unit_names():
    unit = (ROOT / "docs" / "trio-pool-serve.service").read_text()
    program, command, model = re.findall(r"^ExecStart=(\S+) (serve) (\S+)", unit, flags=re.M)[0]
    steps = [line.split() for block in re.findall(r"```sh\n(.*?)```", SYSTEMD_PAGE, flags=re.S)
             for line in block.strip().splitlines()]  # fmt: skip
    environment = Path(program).parents[1]
    assert (steps[0][1:], command) == (["-m", "venv", str(environment)], "serve")
    assert steps[1][0] == str(environment / "bin" / "pip")
    assert (steps[2][0], steps[2][-1]) == (str(environment / "bin" / "hf"), model)
    named = {unit for step in steps if step[0] == "systemctl" for unit in step if unit.startswith("trio-pool-serve.")}
    copied = {Path(word).name for word in steps[3] if word.startswith("docs/")}
    assert copied == named == {"trio-pool-serve.service", "trio-pool-serve.socket"}
    listening = re.findall(r"^ListenStream=(.*)", (ROOT / "docs" / "trio-pool-serve.socket").read_text(), flags=re.M)
    assert any(f"http://{listening[0]}/readyz" in step for step in steps)


def test_systemd_understands_the_units_of_the_documentation(tmp_path: Path):
    units = []
    for kind in ("service", "socket"):
        text = (ROOT / "docs" / f"trio-pool-serve.{kind}").read_text()
        units.append(tmp_path / f"trio-pool-serve.{kind}")
        units[-1].write_text(text.replace("/opt/trio-pool-serve/bin/trio-pool-serve", sys.executable))
    additions = re.search(r"^```ini\n(.*?)^```", SYSTEMD_PAGE, flags=re.M | re.S)
    assert additions
    added = tmp_path / "trio-pool-serve.service.d" / "override.conf"  # what `systemctl edit` writes
    added.parent.mkdir()
    added.write_text(additions[1])
    command = [debian_program("systemd-analyze"), "verify", *map(str, units)]
    verified = subprocess.run(command, capture_output=True, text=True)
    assert (verified.returncode, verified.stdout, verified.stderr) == (0, "", "")  # unknown keys are only warned of
