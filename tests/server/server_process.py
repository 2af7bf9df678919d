"""Real server processes, started and ended by tests."""

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import psutil
import trio
from attrs import define

from tests import conftest
from tests.conftest import client_of
from tests.costs import charge
from tests.cpu_backend import BY_TORCH_FLAGS
from tests.pipes import read
from tests.server.programs import script

ROOT = Path(__file__).parents[2]
LAUNCHER = (sys.executable, "-m", "trio_pool_serve", "serve", *BY_TORCH_FLAGS, "--replicas", "1")  # each loads a model
SCRIPTED = (sys.executable, "-m", "tests.server.programs.scripted_server")
SCRIPTED_ASGI = "tests.server.programs.scripted_asgi:app"
ENGINE_PROGRAM = (sys.executable, "-m", "tests.server.programs.scripted_engine")
START_LIMIT_S = 300

ENGINE_PROCESS, API_PROCESS, RAY_PROCESS = [
    f"trio_pool_serve.server.{each}_process" for each in ("engine", "api", "ray")
]


PORTS = iter(random.SystemRandom().sample(range(10_000, 30_000), 10_000))
"""Below the ephemeral ports, which the kernel gives to connections and to binds to port 0; shuffled per process."""


def free_port() -> int:
    """Return a port to which a server can bind in a while: nothing that others do meanwhile takes it."""
    for port in PORTS:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("every port is taken")


def make_pipes(folder: Path) -> Path:
    """Make the pipes of ``tests/server/programs/script.py`` in a folder, and return it."""
    for name in ("launched", "go"):
        os.mkfifo(folder / name)
    return folder


async def until(condition: Callable[[], object], limit_s: float = START_LIMIT_S) -> None:
    """Wait until a condition holds, as in another process; that may take as long as a start."""
    await conftest.until(condition, limit_s, pause_s=0.01)


def busy_of(load: Any) -> dict[str, float]:
    """Return what of ``/load`` says that something is going on."""
    counts = ("queued_rows", "queued_tokens", "in_flight_batches", "admitted_tokens", "borrowed", "waiting")
    groups = [(group, members) for group, members in load.items() if isinstance(members, dict)]
    parts = {f"{group} {name}": numbers for group, members in groups for name, numbers in members.items()}
    return {
        f"{name} {count}": numbers[count]
        for name, numbers in parts.items()
        for count in counts
        if isinstance(numbers, dict) and numbers.get(count)
    }


async def until_ended(processes: Iterable[psutil.Process]) -> None:
    await until(lambda: not any(each.is_running() and each.status() != psutil.STATUS_ZOMBIE for each in processes))


@define(eq=False)
class ServerProcess:
    process: subprocess.Popen
    port: int
    log_path: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def log(self) -> str:
        return self.log_path.read_text()

    def processes(self, module: str) -> list[psutil.Process]:
        """Return its processes that are alive and run a module."""

        def runs(process: psutil.Process) -> bool:
            try:
                return module in process.cmdline()
            except psutil.Error:  # it has ended meanwhile
                return False

        return [*filter(runs, self.family())]

    def family(self) -> list[psutil.Process]:
        """Return all processes below the first."""
        return psutil.Process(self.process.pid).children(recursive=True)

    async def get(self, path: str, **options) -> httpx.Response:
        async with client_of(self.url) as client:
            return await client.get(path, **options)

    async def post(self, body: object, path: str = "/v1/embeddings", **options) -> httpx.Response:
        async with client_of(self.url) as client:
            return await client.post(path, json=body, **options)

    async def ask(self, *ids: int, **options) -> httpx.Response:
        return await self.post({"input": list(ids)}, **options)

    async def ask_well(self, *ids: int) -> None:
        assert (await self.ask(*ids or (5,))).status_code == 200

    @asynccontextmanager
    async def waiting_request(self, pipes: Path) -> AsyncIterator[list[httpx.Response | None]]:
        """Run the block while a request waits in its forward pass; its response, ``None`` if it was cut off, is in the
        list afterwards. The block has to let it go on, or to end what computes it.
        """
        answers: list[httpx.Response | None] = []

        async def ask() -> None:
            try:
                answers.append(await self.ask(script.WAITS))
            except httpx.TransportError:
                answers.append(None)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            await read(pipes / "launched")
            yield answers

    def signal(self, number: int = signal.SIGTERM) -> None:
        self.process.send_signal(number)

    async def drain(self) -> None:
        self.signal()
        assert await self.wait_exit() == 0

    async def wait_exit(self, limit_s: float = START_LIMIT_S) -> int:
        with trio.fail_after(limit_s):
            return await trio.to_thread.run_sync(self.process.wait, abandon_on_cancel=True)

    async def wait_until(self, path: str, status: int = 200, *, limit_s: float = START_LIMIT_S) -> None:
        """Ask until the answer has that status; the process may not be listening yet."""
        async with client_of(self.url) as client:
            with trio.fail_after(limit_s):
                while True:
                    with contextlib.suppress(httpx.TransportError):
                        if (await client.get(path)).status_code == status:
                            return
                    assert self.process.poll() is None, self.log
                    await trio.sleep(0.02)

    async def wait_logged(self, text: str, times: int = 1) -> None:
        await until(lambda: self.log.count(text) >= times)

    async def wait_joined(self, count: int, meanwhile=trio.lowlevel.checkpoint, **options) -> None:
        """Wait until ``count`` API processes answer, or will once they have loaded."""

        async def have_joined() -> bool:
            await meanwhile()
            return (await self.get("/load", **options)).json()["limiters"]["render"]["capacity"] == 2 * count

        await until(have_joined)

    async def wait_computing(self) -> None:
        """Wait until a request is computed: each API process learns by itself, and later than the log says, that
        another engine process is ready.
        """
        with trio.fail_after(START_LIMIT_S):
            while (answer := await self.ask(5)).status_code != 200:
                assert answer.status_code == 503

    async def wait_exit_and_log(self) -> tuple[int, str]:
        return await self.wait_exit(), self.log


@contextmanager
def started(
    command: Sequence[str | Path],
    port: int,
    log_path: Path,
    env: dict[str, str],
    *,
    pass_fds: Sequence[int] = (),
    stderr: int | None = None,
) -> Iterator[ServerProcess]:
    """Start a command with its output in a file, or its log elsewhere; kill whatever is left of it in the end."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("TRIO_POOL_SERVE_")}
    # Models take long beside other tests: requests wait instead of being refused.
    own = {
        "HF_HUB_OFFLINE": "1",
        "TRIO_POOL_SERVE_MAX_QUEUE_S": "600",
        "XDG_STATE_HOME": str(log_path.parent / "state"),
        "SCRIPT_PIPES": str(log_path.parent),
    }
    log_path.parent.mkdir(exist_ok=True)
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**inherited, **own, **env},
            stdout=log,
            stderr=log if stderr is None else stderr,
            pass_fds=pass_fds,
        )
        try:
            yield ServerProcess(process, port, log_path)
        except BaseException as error:
            error.add_note(f"The log of the server ends with: {log_path.read_text(errors='replace')[-3000:]}")
            raise
        finally:
            family = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
            charge(family)  # the process itself is waited for
            process.kill()
            for child in family:
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.kill()
            process.wait()


@asynccontextmanager
async def launched(
    tmp_path: Path,
    *arguments: str | Path,
    command: Sequence[str | Path] = LAUNCHER,
    env: dict[str, str] | None = None,
    wait_ready: bool = True,
    stderr: int | None = None,
) -> AsyncIterator[ServerProcess]:
    """Start ``trio-pool-serve serve``, or what behaves like it."""
    port = free_port()
    full = [*command, *arguments, "--port", str(port)]
    with started(full, port, tmp_path / "server.log", env or {}, stderr=stderr) as server:
        if wait_ready:
            await server.wait_until("/readyz")
        yield server


scripted = partial(launched, command=SCRIPTED)


@contextmanager
def serving(
    tmp_path: Path, *arguments: str, command: Sequence[str] = LAUNCHER, port: int | None = None
) -> Iterator[ServerProcess]:
    """Start ``trio-pool-serve serve`` outside of an event loop, for fixtures that many tests share."""
    port = port or free_port()
    with started([*command, *arguments, "--port", str(port)], port, tmp_path / "server.log", {}) as server:
        trio.run(server.wait_until, "/readyz")
        yield server


@asynccontextmanager
async def hypercorned(
    tmp_path: Path, app: str, *arguments: str, env: dict[str, str], wait_ready: bool = True
) -> AsyncIterator[ServerProcess]:
    """Start plain hypercorn."""
    port = free_port()
    hypercorn = [sys.executable, "-m", "hypercorn", "--worker-class", "trio", "--bind", f"127.0.0.1:{port}"]
    with started([*hypercorn, *arguments, app], port, tmp_path / "server.log", env) as server:
        if wait_ready:
            await server.wait_until("/readyz")
        yield server
