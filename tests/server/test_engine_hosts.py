"""Engines on other machines: real processes in network namespaces, with a cable between them that is cut."""

import os
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
import trio

from tests.conftest import NO_AUTHORITIES, client_of
from tests.lanes import sampled
from tests.server.network_namespaces import API, ENGINE, Machines, two_machines
from tests.server.programs import script
from tests.server.server_process import (
    ENGINE_PROGRAM,
    ROOT,
    SCRIPTED,
    ServerProcess,
    free_port,
    scripted,
    started,
    until,
)

KEY = "a key that is long enough: 0123456789"
LIMIT_S = 60
BODY = {"input": [5]}
WAITS = {"input": [script.WAITS]}


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "key"
    path.write_text(KEY)
    return path


@asynccontextmanager
async def engine(
    folder: Path,
    key_file: Path,
    address: str,
    *arguments: str,
    name: str = "engine",
    within: Sequence[str] = (),
    env: dict[str, str] | None = None,
) -> AsyncIterator[ServerProcess]:
    """Start ``trio-pool-serve engine`` over a scripted runner."""
    command = [*within, *ENGINE_PROGRAM, f"m={folder}", "--listen", address, "--key-file", str(key_file), *arguments]
    log_path = key_file.with_name(f"{name}.log")
    with started(command, 0, log_path, env or {}) as process:
        await process.wait_logged("listening on")
        yield process


@asynccontextmanager
async def api(
    tmp_path: Path, folder: Path, key_file: Path, hosts: str, *arguments: str
) -> AsyncIterator[ServerProcess]:
    """Start ``trio-pool-serve serve`` over engines that are there already."""
    given = (f"m={folder}", "--engine-hosts", hosts, "--key-file", str(key_file), *arguments)
    async with scripted(tmp_path, *given) as server:
        yield server


def local() -> str:
    return f"127.0.0.1:{free_port()}"


@asynccontextmanager
async def one_host(
    tmp_path: Path, folder: Path, key_file: Path, *arguments: str, at_engine: Sequence[str] = ()
) -> AsyncIterator[tuple[str, ServerProcess, ServerProcess, httpx.AsyncClient]]:
    """Start an engine and a server that computes by it; give the engine's address, both, and a client."""
    address = local()
    async with (
        engine(folder, key_file, address, *at_engine) as remote,
        api(tmp_path, folder, key_file, address, *arguments) as server,
        client_of(server.url) as client,
    ):
        yield address, remote, server, client


async def statuses_of(client: httpx.AsyncClient, count: int = 1) -> Counter[int]:
    return Counter([(await client.post("/v1/embeddings", json=BODY)).status_code for _ in range(count)])


async def computes(client: httpx.AsyncClient) -> bool:
    return await statuses_of(client) == {200: 1}


class Load:
    """Clients that send one request after the other, and what became of each."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self.client = client
        self.statuses: Counter[int] = Counter()
        self.slowest_s = 0.0
        self.stopped = False

    async def send(self) -> None:
        while not self.stopped:
            began = trio.current_time()
            answer = await self.client.post("/v1/embeddings", json=BODY)
            self.slowest_s = max(self.slowest_s, trio.current_time() - began)
            self.statuses[answer.status_code] += 1
            if answer.status_code != 200:
                assert answer.json()["error"]["message"], "it says why"
                await trio.sleep(0.01)

    async def wait_answered(self, more: int, status: int = 200) -> None:
        wanted = self.statuses[status] + more
        await until(lambda: self.statuses[status] >= wanted)

    @property
    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with trio.open_nursery() as nursery:
            for _ in range(8):
                nursery.start_soon(self.send)
            yield
            self.stopped = True


async def test_a_server_whose_own_engine_processes_have_all_failed_computes_on_its_host(
    tmp_path, scripted_folder, key_file
):
    address, fails = local(), {"SCRIPT_LOAD_ERROR": "there are no weights"}
    given = (f"m={scripted_folder}", "--engine-hosts", address, "--key-file", str(key_file))
    also_here = ("--engine", "process", "--replicas", "2")
    async with (
        engine(scripted_folder, key_file, address),
        scripted(tmp_path, *given, *also_here, env=fails) as server,
        client_of(server.url) as client,
    ):
        await server.wait_logged("failed, leaving 0 of 2 replicas and --engine-hosts")
        assert await statuses_of(client, 3) == {200: 3}
        replicas = (await client.get("/load")).json()["models"]["m"]["replicas"]
        assert [replica["state"] for replica in replicas.values()] == ["failed", "failed"]
        await server.drain()


# -- two machines ----------------------------------------------------------------------------------------


@pytest.mark.slow
async def test_a_cut_cable_fails_requests_soon_and_a_mended_one_serves_them_again(tmp_path, scripted_folder, key_file):
    """The server's HTTP is a Unix socket, which namespaces of networks do not separate."""
    transport = httpx.AsyncHTTPTransport(uds=str(tmp_path / "http.sock"), verify=NO_AUTHORITIES)
    given = [f"m={scripted_folder}", "--engine-hosts", f"{ENGINE}:9000", "--key-file", str(key_file)]
    given += ["--host", f"unix:{tmp_path / 'http.sock'}"]
    with two_machines() as machines:
        within, command = machines.command_on(machines.engine), machines.command_on(machines.api, *SCRIPTED, *given)
        async with (
            engine(scripted_folder, key_file, f"{ENGINE}:9000", within=within) as remote,
            httpx.AsyncClient(transport=transport, base_url="http://api", timeout=LIMIT_S) as client,
        ):
            with started(command, 0, tmp_path / "server.log", {}) as server:
                await server.wait_logged('"ready"')
                await cut_and_mend(machines, client, server, remote)


async def cut_and_mend(
    machines: Machines, client: httpx.AsyncClient, server: ServerProcess, remote: ServerProcess
) -> None:
    load = Load(client)
    async with load.running:
        await load.wait_answered(200)
        machines.cut()
        # Requests that are at the engine fail once the silence is noticed, later ones at once.
        await load.wait_answered(50, status=503)
        machines.mend()
        await load.wait_answered(200)
    assert set(load.statuses) == {200, 503}, "every request is answered"
    assert load.slowest_s < 10, "TCP by itself would try for a quarter of an hour"
    # By the silence, or by what the kernel has sent in vain.
    assert f"the connection to the engine process at {ENGINE}:9000 ended" in server.log
    await remote.wait_logged(f"an API process at {API}")
    assert "disconnected" in remote.log
    load_now = (await client.get("/load")).json()["models"]["m"]
    assert load_now["admitted_tokens"] == 0
    (host,) = (await client.get("/engine_hosts")).json()["hosts"][0]["engines"]
    assert (host["state"], host["waiting_rows"], host["waiting_tokens"]) == ("ready", 0, 0)
    await server.drain()
    await remote.drain()


# -- one machine, several addresses ----------------------------------------------------------------------


async def test_an_engine_that_is_killed_fails_its_rows_at_once_and_its_successor_is_found(
    tmp_path, scripted_folder, key_file, pipes
):
    address, env = local(), {"SCRIPT_PIPES": str(pipes)}
    async with (
        engine(scripted_folder, key_file, address, env=env) as first,
        api(tmp_path, scripted_folder, key_file, address) as server,
        client_of(server.url) as client,
    ):
        async with server.waiting_request(pipes) as answers:
            first.signal(signal.SIGKILL)
        assert answers[0].status_code == 503
        assert "was lost" in answers[0].json()["error"]["message"]
        assert (await client.get("/readyz")).status_code == 503
        async with engine(scripted_folder, key_file, address, name="second"):
            await until(lambda: computes(client))
            assert (await client.get("/readyz")).status_code == 200


@pytest.mark.slow
@pytest.mark.parametrize("is_killed", [False, True], ids=["told to end", "killed"])
async def test_an_engine_that_ends_under_load_costs_no_request(tmp_path, scripted_folder, key_file, is_killed):
    """Requests of a single row survive even an engine that is killed."""
    one, two = local(), local()
    async with (
        engine(scripted_folder, key_file, one, name="one") as first,
        engine(scripted_folder, key_file, two, name="two"),
        api(tmp_path, scripted_folder, key_file, f"{one},{two}") as server,
        client_of(server.url) as client,
    ):
        await server.wait_logged("computes m", times=2)
        load = Load(client)
        async with load.running:
            await load.wait_answered(100)
            if is_killed:
                first.signal(signal.SIGKILL)
            else:
                await first.drain()
            await load.wait_answered(100)
        assert set(load.statuses) == {200}
        assert "unfinished" not in first.log


@pytest.mark.slow
async def test_a_server_with_another_key_is_refused_and_told_and_the_others_go_on(tmp_path, scripted_folder, key_file):
    (tmp_path / "other").mkdir()
    other_key = tmp_path / "other" / "key"
    other_key.write_text("another key that is long enough 123")
    async with one_host(tmp_path, scripted_folder, key_file) as (address, remote, _, client):
        given = (f"m={scripted_folder}", "--engine-hosts", address, "--key-file", str(other_key))
        async with scripted(tmp_path / "other", *given, wait_ready=False) as stranger:
            await stranger.wait_logged("the keys of the two ends differ")
            await remote.wait_logged("refused a connection from")
            assert (await stranger.get("/readyz")).status_code == 503
            assert await statuses_of(client, 20) == {200: 20}
            # The new key is accepted beside the old one once the engine has read both.
            key_file.write_text(f"{KEY}\n{other_key.read_text()}\n")
            remote.signal(signal.SIGHUP)
            await stranger.wait_until("/readyz")
            assert await statuses_of(client, 5) == {200: 5}


@pytest.mark.slow
async def test_hosts_of_a_file_join_with_sighup(tmp_path, scripted_folder, key_file):
    one, two = local(), local()
    hosts = tmp_path / "hosts"
    hosts.write_text(f"{one}  # the first\n")
    async with (
        engine(scripted_folder, key_file, one, name="one") as first,
        engine(scripted_folder, key_file, two, name="two"),
        api(tmp_path, scripted_folder, key_file, str(hosts)) as server,
        client_of(server.url) as client,
    ):
        hosts.write_text("nonsense\n")
        server.signal(signal.SIGHUP)
        await server.wait_logged("reloading the hosts failed")
        assert await statuses_of(client) == {200: 1}
        hosts.write_text(f"{two}\n")
        server.signal(signal.SIGHUP)
        await server.wait_logged(f"the engine at {two} computes m")
        await until(lambda: computes(client))
        await first.drain()
        assert await statuses_of(client, 10) == {200: 10}


def hosts_command(
    server: ServerProcess, *arguments: str, key: str | None = "secret"
) -> subprocess.CompletedProcess[str]:
    options = [] if key is None else ["--api-key", key]
    command = [sys.executable, "-m", "trio_pool_serve", "hosts", *arguments, "--url", server.url, *options]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env={"PATH": "", "COLUMNS": "300"})


@pytest.mark.slow
async def test_hosts_are_listed_drained_and_added_by_a_command(tmp_path, scripted_folder, key_file):
    one, two = local(), local()
    async with (
        engine(scripted_folder, key_file, one, "--zone", "left", name="one") as first,
        engine(scripted_folder, key_file, two, name="two"),
        api(tmp_path, scripted_folder, key_file, one, "--api-key", "secret", "--api-workers", "2") as server,
    ):

        async def run(*arguments: str, **options) -> subprocess.CompletedProcess[str]:
            return await trio.to_thread.run_sync(lambda: hosts_command(server, *arguments, **options))

        listed = await run("list")
        assert listed.returncode == 0, listed
        assert one in listed.stdout
        assert "left" in listed.stdout
        assert "401" in (await run("list", key=None)).stdout
        for arguments, status in ((("drain", "1.2.3.4:5"), 1), (("add", "nonsense"), 1), (("add", two), 0)):
            assert (await run(*arguments)).returncode == status
        # Of two API processes, each computes by both hosts.
        await server.wait_logged(f"the engine at {two} computes m", times=2)
        assert "draining" in (await run("drain", one)).stdout

        async def is_drained() -> bool:
            answers = [(await run("list")).stdout for _ in range(2)]
            return all("draining" in answer for answer in answers)

        await until(is_drained)
        await first.drain()
        async with client_of(server.url) as client:
            client.headers["Authorization"] = "Bearer secret"
            assert await statuses_of(client, 20) == {200: 20}


@pytest.mark.slow
async def test_without_keys_hosts_are_listed_by_their_whole_addresses_and_cannot_be_changed(
    tmp_path, scripted_folder, key_file
):
    address, absent = f"[::1]:{free_port()}", "[fd00::2]:9000"
    async with (
        engine(scripted_folder, key_file, address),
        api(tmp_path, scripted_folder, key_file, f"{address},{absent}") as server,
        client_of(server.url) as client,
    ):
        listed = await trio.to_thread.run_sync(lambda: hosts_command(server, "list", key=None))
        for each in (address, absent):
            assert [line.split()[:2] for line in listed.stdout.splitlines()].count([each] * 2) == 1, listed.stdout
        for path in ("/engine_hosts", "/engine_hosts/drain"):
            assert (await client.post(path, json={"host": address})).status_code == 403
        assert (await client.get("/engine_hosts")).json()["hosts"][0]["engines"][0]["state"] == "ready"
        assert 'trio_pool_serve_link{address="' in (await client.get("/metrics")).text


async def tokens_of(client: httpx.AsyncClient) -> float:
    """Return how many tokens the engine processes of a server have computed."""
    (tokens,) = re.findall(r'^trio_pool_serve_tokens_total{model="m"} (.*)$', (await client.get("/metrics")).text, re.M)
    return float(tokens)


async def test_engine_processes_of_the_own_machine_are_of_its_zone(tmp_path, scripted_folder, key_file):
    zone = ("--zone", "here")
    given = (*zone, "--engine", "process", "--replicas", "1")
    async with one_host(tmp_path, scripted_folder, key_file, *given, at_engine=zone) as (address, _, server, client):
        await server.wait_logged(f"the engine at {address} computes m")
        before = await tokens_of(client)

        async def own_process_computed() -> bool:
            assert await computes(client)
            return await tokens_of(client) > before

        # Of two that are equally near each is tried; of another zone it would get only rows that have waited.
        await until(own_process_computed, limit_s=60)


async def test_an_engine_that_is_told_to_end_while_it_loads_ends_at_once(scripted_folder, key_file):
    os.mkfifo(key_file.with_name("load"))
    command = [*ENGINE_PROGRAM, f"m={scripted_folder}", "--listen", local(), "--key-file", str(key_file)]
    env = {"SCRIPT_LOADING": str(key_file.with_name("load"))}
    with started(command, 0, key_file.with_name("engine.log"), env) as process:
        await trio.to_thread.run_sync(key_file.with_name("load").read_text, abandon_on_cancel=True)
        process.signal()
        assert await process.wait_exit(30) == 0


async def test_an_engine_s_probes_tell_whether_it_computes(scripted_folder, key_file):
    address, probes = local(), local()
    async with (
        engine(scripted_folder, key_file, address, "--probe-listen", probes) as process,
        client_of(f"http://{probes}") as client,
    ):
        for path, status in (("/livez", 200), ("/readyz", 200), ("/metrics", 200), ("/", 404)):
            assert (await client.get(path)).status_code == status
        assert 'trio_pool_serve_engine{model="m",of="ready"} 1.0' in (await client.get("/metrics")).text
        await process.drain()


REFUSED = {
    "an address that is none": ("--listen nowhere --key-file {key}", 2, "is not HOST:PORT"),
    "no key": ("--listen 127.0.0.1:1 --key-file {key}.gone", 2, "No such file"),
    "a zone that is none": ("--listen 127.0.0.1:1 --key-file {key} --zone a+b", 2, "zone"),
    "an address of another machine": ("--listen 192.0.2.1:9000 --key-file {key}", 1, "Cannot assign"),
    "probes at such an address": (
        "--listen 127.0.0.1:1 --key-file {key} --probe-listen 192.0.2.1:1", 1, "192.0.2.1:1 cannot be listened on"
    ),
}  # fmt: skip


@sampled(("arguments", "status", "message"), REFUSED.values(), keep=[REFUSED["no key"]], ids=REFUSED)
def test_an_engine_that_cannot_start_says_why(scripted_folder, key_file, arguments, status, message):
    given = arguments.format(key=key_file).split()
    command = [*ENGINE_PROGRAM, str(scripted_folder), *given]
    if status == 2:
        command = [sys.executable, "-m", "trio_pool_serve", "engine", str(scripted_folder), *given]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == status, run.stderr
    assert message in run.stderr
