"""A server of one test, and the requests to it."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import trio

from tests.conftest import client_of, listening, running
from tests.scripted_runner import ScriptedRunner
from trio_pool_serve.config import Config
from trio_pool_serve.service import Service


async def connect(url: str | httpx.URL) -> trio.SocketStream:
    """Return a connection to a server that listens on this machine."""
    where = httpx.URL(url)
    return await trio.open_tcp_stream(where.host, where.port)


@asynccontextmanager
async def serving(config: Config, runner: ScriptedRunner) -> AsyncIterator[tuple[Service, httpx.AsyncClient]]:
    """Serve a scripted model on a real socket; gives the service and a client."""
    async with (
        running(Service(config, lambda *_: runner)) as service,
        listening(service) as url,
        client_of(url) as client,
    ):
        yield service, client


async def until_launching(scripted: ScriptedRunner) -> None:
    """Wait until a batch is being computed."""
    await trio.to_thread.run_sync(scripted.launching.wait, limiter=trio.CapacityLimiter(1))


async def post(client: httpx.AsyncClient, path: str = "/v1/embeddings", **body: Any) -> Any:
    """Return the answer to a request, which must be 200."""
    answer = await client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def vectors(client: httpx.AsyncClient, path: str = "/v1/embeddings", **body: Any) -> list[Any]:
    """Return the vectors of an answer as OpenAI's clients read it."""
    data = (await post(client, path, **body))["data"]
    assert [item["index"] for item in data] == [*range(len(data))]
    return [item["embedding"] for item in data]


async def refused(
    client: httpx.AsyncClient, path: str = "/v1/embeddings", body: Any = None, status: int = 400, **fields: Any
) -> dict[str, Any]:
    """Return the error of a request that is refused, as OpenAI's clients read it."""
    answer = await client.post(path, json=fields if body is None else body)
    assert answer.status_code == status, answer.text
    return answer.json()["error"]


def key_file_of(folder: Path, keys: str) -> Path:
    """Write a file of API keys that only its user can read."""
    path = folder / "keys.toml"
    path.write_text(keys)
    path.chmod(0o600)
    return path
