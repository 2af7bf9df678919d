"""A service whose models can be loaded and unloaded while it runs, over scripted runners."""

import threading
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import trio
from attrs import define, field

from tests.conftest import client_of, listening, render_templates_on_the_loop, running
from tests.model_folders import write_scripted_folder
from tests.scripted_runner import ScriptedRunner
from tests.server.server_process import until
from trio_pool_serve.config import Config, ModelChangesConfig, NetworkConfig, ProcessesConfig, TimeLimitsConfig
from trio_pool_serve.errors import ModelLoadError
from trio_pool_serve.service import Service

ADMIN = {"authorization": "Bearer admin-key"}


@define(eq=False)
class Loader:
    """Loads a new ``ScriptedRunner`` for each load of a folder; those of ``held`` wait for ``gate``."""

    runners: dict[str, list[ScriptedRunner]] = field(factory=dict)
    loads: Counter[str] = field(factory=Counter)
    held: set[str] = field(factory=set)
    broken: set[str] = field(factory=set)
    on_prepare: Callable[[], object] | None = None
    gate: threading.Event = field(factory=threading.Event)
    entered: threading.Event = field(factory=threading.Event)
    """Set once a load that is held has begun."""

    def load(self, folder: Any, *_: object) -> ScriptedRunner:
        name = folder.path.name
        self.loads[name] += 1
        if name in self.held:
            self.entered.set()
            self.gate.wait()
        if name in self.broken:
            raise ModelLoadError(f"{folder.path} is broken")
        runner = ScriptedRunner(dimensions=4 + len(name), on_prepare=self.on_prepare)
        self.runners.setdefault(name, []).append(runner)
        return runner

    async def wait_entered(self) -> None:
        with trio.fail_after(30):
            await trio.to_thread.run_sync(self.entered.wait)


@define(eq=False)
class Changing:
    """A live server over such a service, with model ``a`` at the start; ``folder`` has those of others."""

    service: Service
    loader: Loader
    folder: Path
    client: httpx.AsyncClient

    async def load(self, folder: str, **more: object) -> httpx.Response:
        body = {"model": str(self.folder / folder), "name": folder, **more}
        return await self.client.post("/v1/models", json=body, headers=ADMIN)

    async def unload(self, name: str, query: str = "") -> httpx.Response:
        return await self.client.delete(f"/v1/models/{name}{query}", headers=ADMIN)

    async def embed(self, model: str | None = None, text: str = "hello", **more: object) -> httpx.Response:
        body = {"input": text, **({} if model is None else {"model": model}), **more}
        return await self.client.post("/v1/embeddings", json=body, headers=ADMIN)

    @asynccontextmanager
    async def in_use(self, name: str) -> AsyncIterator[list[httpx.Response]]:
        """A request computes with a model inside the block; behind it, the list has its response."""
        (runner,) = self.loader.runners[name]
        runner.gate.clear()
        async with self.asking(self.embed, name) as answers:
            await until(lambda: self.service.served[name].users)
            yield answers
            runner.gate.set()

    @asynccontextmanager
    async def loading(self, name: str) -> AsyncIterator[list[httpx.Response]]:
        """A request loads a model inside the block; behind it, the list has its response."""
        self.loader.held.add(name)
        async with self.asking(self.load, name) as answers:
            await self.loader.wait_entered()
            yield answers
            self.loader.gate.set()

    @asynccontextmanager
    async def asking(
        self, ask: Callable[..., Awaitable[httpx.Response]], *arguments: str
    ) -> AsyncIterator[list[httpx.Response]]:
        """A request runs beside the block, which ends after it; the list has its response."""
        answers: list[httpx.Response] = []

        async def keep() -> None:
            answers.append(await ask(*arguments))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(keep)
            yield answers

    async def states(self) -> dict[str, str]:
        answer = await self.client.get("/v1/models", headers=ADMIN)
        return {card["id"]: card["state"] for card in answer.json()["data"]}

    async def wait_state(self, name: str, state: str | None) -> None:
        with trio.fail_after(30):
            while (await self.states()).get(name) != state:  # noqa: ASYNC110
                await trio.sleep(0.005)

    async def metric(self, name: str) -> float:
        text = (await self.client.get("/metrics", headers=ADMIN)).text
        return next((float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(name)), -1.0)


@asynccontextmanager
async def changing(
    folder: Path,
    *,
    at_start: tuple[str, ...] = ("a",),
    loader: Loader | None = None,
    network: NetworkConfig | None = None,
    drain_timeout_s: float = 30.0,
    replicas: int | None = None,
    **settings: object,
) -> AsyncIterator[Changing]:
    """Run a service with models ``at_start``, and a server over it; folders ``a`` to ``d`` are there to be loaded."""
    loader = loader or Loader()
    for name in "abcd":
        write_scripted_folder(folder / name, max_length=16 if name == "b" else 64)
    config = Config(
        models=tuple(f"{name}={folder / name}" for name in at_start),
        network=network or NetworkConfig(api_key="admin-key"),
        processes=ProcessesConfig(replicas=replicas),
        time_limits=TimeLimitsConfig(drain_timeout_s=drain_timeout_s),
        model_changes=ModelChangesConfig(**{"model_api": True, **settings}),
    )
    service = Service(config, loader.load)
    render_templates_on_the_loop(service)
    async with running(service), listening(service) as url, client_of(url) as client:
        try:
            yield Changing(service, loader, folder, client)
        finally:
            loader.gate.set()
