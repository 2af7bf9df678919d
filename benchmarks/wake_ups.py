"""How often is an event loop woken for one request of one text alone? Counts for each process of a server.

Everything runs in this process: with ``--engine process``, the event loop of the engine process runs in a thread of its
own, linked by the same Unix socket. The client is a thread without an event loop. Each count is the smallest of several
requests, until nothing is left to do: now and then, something else happens meanwhile.

    python -m benchmarks.wake_ups            # of one request: sleeps, results of threads, steps of tasks
    python -m benchmarks.wake_ups --steps    # and the steps of the last request, in order
"""

import json
import socket
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import cyclopts
import trio
from attrs import asdict, astuple, define, field, frozen
from cyclopts import Parameter

from benchmarks.model import MODEL_PATH
from benchmarks.report import RESULTS, Report, print_table
from trio_pool_serve.config import Config, ProcessesConfig
from trio_pool_serve.config.computing_config import Placement
from trio_pool_serve.engine.places.supervisor import paths_of
from trio_pool_serve.engine.remote.device_server import DeviceServer
from trio_pool_serve.models.loading.runner_loader import load_model, load_transformer
from trio_pool_serve.process_setup import open_service
from trio_pool_serve.processes.socket_folder import serve_at
from trio_pool_serve.server.listener import serve_listeners
from trio_pool_serve.service import Service
from trio_pool_serve.telemetry.metrics import Metrics
from trio_pool_serve.threads.offload import Offload

REQUESTS = 20

SETTLE_S = 0.05
"""After a response, for what the server still does."""

BODY = json.dumps({"input": "first", "encoding_format": "base64"}).encode()

REQUEST = b"POST /v1/embeddings HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
REQUEST += b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY

OF_THREADS = "run_sync_soon"
"""In the name of trio's task that runs what other threads send to the event loop."""


@define(eq=False)
class WakeUps(trio.abc.Instrument):
    """What wakes an event loop, in order."""

    steps: list[str] = field(init=False, factory=list)
    """``sleep`` or ``poll`` each time the loop asks for events, and the name of each task that runs then."""

    def before_io_wait(self, timeout: float) -> None:
        """Note that the loop asks for events; without a timeout, only what is there already."""
        self.steps.append("sleep" if timeout else "poll")

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        """Note that a task runs."""
        self.steps.append(OF_THREADS if OF_THREADS in task.name else task.name.rpartition(".")[2])


@frozen
class Woken:
    """How often an event loop slept, got results of threads, looked for events without sleeping, and ran a task."""

    sleeps: int
    threads: int
    polls: int
    tasks: int

    @classmethod
    def smallest(cls, requests: Sequence[Sequence[str]]) -> "Woken":
        """Return the smallest counts of all requests."""
        counts = [Counter(steps) for steps in requests]
        tasks = min(each.total() - each["sleep"] - each["poll"] - each[OF_THREADS] for each in counts)
        return cls(*(min(each[name] for each in counts) for name in ("sleep", OF_THREADS, "poll")), tasks)


async def run_engine(config: Config, path: Path) -> None:
    """Be an engine process: serve a device at ``path``. Cancellation: at once."""
    offload = Offload(launch=1)
    load = partial(load_model, config, config.sources[0], load_transformer, offload)
    engine = DeviceServer(config.scheduling, load=load, offload=offload, metrics=Metrics().of_engine("m"))

    async def serve(listeners: list[trio.SocketListener]) -> None:
        await engine.dispatcher.wait_ready()
        await trio.serve_listeners(engine.serve, listeners)

    async with trio.open_nursery() as nursery:
        await nursery.start(serve_at, path, serve)
        await engine.run()


@asynccontextmanager
async def open_linked(config: Config, engine_loop: WakeUps) -> AsyncIterator[Service]:
    """Run an API process's service, with an engine process in a thread."""
    with TemporaryDirectory() as folder:
        (path,) = paths_of(config, Path(folder), model=0)
        run = partial(trio.run, run_engine, config, path, instruments=[engine_loop])
        threading.Thread(target=run, daemon=True).start()
        service = Service(config, socket_folder=Path(folder), api_worker=1)
        async with trio.open_nursery() as nursery:
            await nursery.start(service.run)
            await service.wait_ready()
            yield service
            nursery.cancel_scope.cancel(reason="all is counted")


async def count(placement: Placement) -> tuple[list[list[str]], list[list[str]]]:
    """Return the steps of each request, of the API process and of the engine process. Cancellation: at once."""
    config = Config(models=(MODEL_PATH,), processes=ProcessesConfig(engine=placement, replicas=1))
    api_loop, engine_loop = WakeUps(), WakeUps()
    opened = open_linked(config, engine_loop) if placement == "process" else open_service(config)
    async with opened as service, trio.open_nursery() as nursery:
        with socket.create_server(("127.0.0.1", 0)) as listening:
            listening.setblocking(False)  # noqa: FBT003
            nursery.start_soon(serve_listeners, service, listening, trio.Event(), None)
            trio.lowlevel.add_instrument(api_loop)
            steps = await trio.to_thread.run_sync(ask, listening.getsockname(), api_loop, engine_loop)
            nursery.cancel_scope.cancel(reason="all is counted")
    return steps


def ask(address: tuple[str, int], *loops: WakeUps) -> tuple[list[list[str]], ...]:
    """Send requests on one connection; return the steps of each, by event loop. Blocking."""
    requests: list[tuple[list[str], ...]] = []
    with socket.create_connection(address, timeout=60) as connection:
        for _ in range(REQUESTS):
            time.sleep(SETTLE_S)
            for loop in loops:
                loop.steps = []
            connection.sendall(REQUEST)
            received = b""
            while b'"usage"' not in received:
                received += (more := connection.recv(2**16))
                if not more or b'"error"' in received:
                    raise ValueError(f"no embeddings: {received!r}")
            time.sleep(SETTLE_S)
            requests.append(tuple([*loop.steps] for loop in loops))
    return tuple([list(of_loop) for of_loop in zip(*requests, strict=True)])


@Parameter(name="*")
@frozen(kw_only=True)
class Settings:
    """The settings. ``steps``: print the steps of the last request as well."""

    steps: Annotated[bool, Parameter(negative=())] = False
    output_dir: Path = RESULTS


def main(settings: Settings = Settings()) -> None:
    """Count the wake-ups of a request, in this process and with an engine process."""
    report = Report("wake_ups", settings)
    alone, _ = trio.run(count, "local")
    linked = trio.run(count, "process")
    of_loops = dict(zip(("--engine local", "API process", "engine process"), (alone, *linked), strict=True))
    counts = {name: Woken.smallest(steps) for name, steps in of_loops.items()}
    columns = ["", "sleeps", "results of threads", "looks without sleep", "steps of tasks"]
    rows = [[name, *map(str, astuple(each))] for name, each in counts.items()]
    print_table("Wake-ups of one request of one text", columns, rows)
    last = {name: steps[-1] for name, steps in of_loops.items()}
    if settings.steps:
        for name, steps in last.items():
            print_table(name, ["step"], [[step] for step in steps])
    report.write(counts={name: asdict(each) for name, each in counts.items()}, steps=last)


if __name__ == "__main__":
    cyclopts.run(main)
