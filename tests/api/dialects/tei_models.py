"""Kinds of model that a ``ScriptedRunner`` stands in for, served on a real socket."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import attrs
import httpx

from tests.api.scripted_models import serve_as
from tests.api.serving import serving as serve_scripted
from tests.conftest import wait_idle
from tests.scripted_runner import ScriptedRunner
from trio_pool_serve.config import Config
from trio_pool_serve.models.model_kind import ModelSpec
from trio_pool_serve.service import Service


@attrs.frozen
class Judging(ModelSpec):
    tasks = frozenset({"classify", "score"})
    scoring = "pairs"
    labels: tuple[str, ...] = ("fits",)


@attrs.frozen(eq=False)
class Served:
    """A server with one kind of model, and a client of it."""

    service: Service
    runner: ScriptedRunner
    http: httpx.AsyncClient

    async def ok(self, path: str, **body) -> httpx.Response:
        answer = await self.http.post(path, json=body)
        assert answer.status_code == 200, answer.text
        return answer

    async def ask(self, path: str, **body):
        return (await self.ok(path, **body)).json()

    async def refused(self, path: str, **body) -> tuple[int, str]:
        """Return the status and the ``error_type``; whatever was wrong has left nothing behind."""
        answer = await self.http.post(path, json=body)
        assert_error_body(answer)
        await wait_idle(self.service)
        return answer.status_code, answer.json()["error_type"]

    @property
    def params(self) -> list:
        """What has been asked of the runner, row by row."""
        return [param for batch in self.runner.batches for request in batch.requests for param in request.params]


def assert_error_body(answer: httpx.Response) -> None:
    body = answer.json()
    assert list(body) == ["error", "error_type"], body
    assert body["error"]
    assert answer.headers["content-type"] == "application/json"


@asynccontextmanager
async def serving(config: Config, spec: ModelSpec | None = None, *, labels: int = 2) -> AsyncIterator[Served]:
    """Serve a scripted model of a kind; ``None`` is an embedding model."""
    runner = ScriptedRunner(labels=labels)
    async with serve_scripted(config, runner) as (service, http):
        if spec is not None:
            serve_as(service, spec)
        yield Served(service, runner, http)
        await wait_idle(service)
