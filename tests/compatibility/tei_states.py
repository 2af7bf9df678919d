"""Servers in states that TEI has statuses for: full, and loading. A scripted runner stands in for the model."""

import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import httpx
import trio
from anyio.from_thread import start_blocking_portal

from tests.api.dialects.tei_models import Judging, serving
from tests.api.scripted_models import Labeller, SparseOnly
from tests.conftest import listening, make_slow
from tests.scripted_runner import ScriptedRunner
from trio_pool_serve.config import Config
from trio_pool_serve.service import Service

SPECS = {
    "embedding": None,
    "splade": SparseOnly(),
    "classifier": Labeller(),
    "reranker": Judging(),
}


@contextmanager
def full(folder: Path, kind: str, path: str, body: object) -> Iterator[httpx.Client]:
    """Serve a model whose queue is full with one request; gives a client of that server."""
    config = Config(models=(str(folder),))
    served = serving(config, SPECS[kind], labels=1 if kind == "reranker" else 2)
    with start_blocking_portal("trio") as portal, portal.wrap_async_context_manager(served) as server:
        make_slow(server.service)
        server.runner.gate.clear()
        with ThreadPoolExecutor(1) as threads, httpx.Client(base_url=server.http.base_url, timeout=60) as http:
            first = threads.submit(http.post, path, json=body)
            try:
                assert server.runner.launching.wait(60)
                yield http
            finally:
                server.runner.gate.set()
            assert first.result().status_code == 200


@asynccontextmanager
async def _loading(folder: Path, loaded: threading.Event) -> AsyncIterator[str]:
    def load(*_: object) -> ScriptedRunner:
        assert loaded.wait(60)
        return ScriptedRunner()

    service = Service(Config(models=(str(folder),)), load)
    async with trio.open_nursery() as nursery:
        await nursery.start(service.run)
        async with listening(service) as url:
            yield url
        nursery.cancel_scope.cancel(reason="the test is over")


@contextmanager
def loading(folder: Path) -> Iterator[tuple[httpx.Client, threading.Event]]:
    """Serve a model that is loaded once the event is set; gives a client of that server, and the event."""
    loaded = threading.Event()
    with (
        start_blocking_portal("trio") as portal,
        portal.wrap_async_context_manager(_loading(folder, loaded)) as url,
        httpx.Client(base_url=url, timeout=60) as http,
    ):
        try:
            yield http, loaded
        finally:
            loaded.set()
