"""Ray's test cluster in a process of its own, and the processes of its nodes."""

import contextlib
import os
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import psutil
import trio
from attrs import define

from tests.conftest import client_of
from tests.costs import charge
from tests.server.server_process import ENGINE_PROCESS, ROOT, ServerProcess, until

CLUSTER_ENVIRONMENT = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}
"""Ray's workers have a niceness of 15 by default: beside other tests they would get next to no time."""

PROGRAM = (sys.executable, "-m", "tests.ray.ray_cluster_program")

ACTOR = "ray::EngineActor"
"""Begins the title of a process that runs one."""

HEAD = "gcs_server"


@define(eq=False)
class ClusterProcess:
    process: subprocess.Popen
    address: str

    @property
    def variables(self) -> dict[str, str]:
        """The environment of a server that uses the cluster, with a CPU for each replica."""
        return {"RAY_ADDRESS": self.address, "OMP_NUM_THREADS": "1"}

    def tell(self, *words: str) -> str:
        """Have it do something; return what it answers."""
        self.process.stdin.write(" ".join(words) + "\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().split()[1]

    def add_node(self, cpus: int) -> str:
        return self.tell("add", str(cpus))

    def kill_node(self, node: str) -> None:
        self.tell("kill", node)

    def processes(self, what: str) -> list[psutil.Process]:
        """Return its processes: ``ACTOR``, ``ENGINE_PROCESS`` or ``HEAD``, those of lost nodes included."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                words = process.cmdline()
                is_it = what in words or (words and (words[0].startswith(what) or Path(words[0]).name == what))
                if is_it and process.environ().get("CLUSTER_OF_TEST") == str(self.process.pid):
                    found.append(process)
        return found

    @property
    def is_empty(self) -> bool:
        """No actor and no engine process is left on any node, lost ones included."""
        return not self.processes(ACTOR) and not self.processes(ENGINE_PROCESS)

    def node_of(self, engine: psutil.Process) -> int:
        """Return the raylet on whose node an engine process runs."""
        return engine.parent().ppid()


@contextmanager
def ray_cluster(folder: Path, *, port: int = 0, **env: str) -> Iterator[ClusterProcess]:
    """Start a cluster whose head computes nothing, at a port that is free if none is given."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **CLUSTER_ENVIRONMENT, **env}
    with (folder / "cluster.log").open("wb") as log:
        process = subprocess.Popen(
            [*PROGRAM, str(port)],
            cwd=ROOT,
            env=env,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
        )
        try:
            yield ClusterProcess(process, process.stdout.readline().split()[1])
        finally:
            family = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
            charge(family)
            process.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(30)
            for one in [*family, process]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    one.kill()
            process.wait()
            process.stdout.close()


async def load_of(server: ServerProcess) -> dict:
    async with client_of(server.url) as client:
        (model,) = (await client.get("/load")).json()["models"].values()
    return model


async def until_load(server: ServerProcess, is_so: Callable[[dict], bool]) -> None:
    """Wait until what the engine processes have said of the model is so."""

    async def holds() -> bool:
        return is_so(await load_of(server))

    await until(holds)


async def until_ready(server: ServerProcess, count: int, restarts: int = 0) -> None:
    """Wait until so many replicas are ready, and have been restarted so often in all."""

    def are_ready(load: dict) -> bool:
        replicas = load.get("replicas", {}).values()
        has_restarted = sum(one["restarts"] for one in replicas) >= restarts
        return [one["state"] for one in replicas] == ["ready"] * count and has_restarted

    await until_load(server, are_ready)


@asynccontextmanager
async def asking(server: ServerProcess, inputs: list, clients: int, pause_s: float) -> AsyncIterator[Counter[int]]:
    """Send requests until the block is left; one without a whole answer fails the test. Gives their statuses."""
    statuses, is_over = Counter[int](), trio.Event()

    async def keep_asking() -> None:
        async with client_of(server.url) as client:
            while not is_over.is_set():
                statuses[(await client.post("/v1/embeddings", json={"input": inputs})).status_code] += 1
                await trio.sleep(pause_s)

    async with trio.open_nursery() as nursery:
        for _ in range(clients):
            nursery.start_soon(keep_asking)
        yield statuses
        is_over.set()


@asynccontextmanager
async def leaving_nothing(server: ServerProcess, cluster: ClusterProcess) -> AsyncIterator[None]:
    """End the server by SIGTERM behind the block: it exits with 0, and nothing of it is left on the nodes."""
    yield
    await server.drain()
    await until(lambda: cluster.is_empty)
