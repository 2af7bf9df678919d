"""The errors of every dialect as its clients see them, asked for over a socket: the table of docs/errors-by-dialect.md.

``python -m tests.api.dialects.error_table`` writes the page.
"""

import re
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import attrs
import httpx
import trio

from tests.api.scripted_models import Everything, serve_as
from tests.api.serving import serving
from tests.conftest import full_queue
from tests.model_folders import write_scripted_folder
from tests.scripted_runner import ScriptedRunner
from trio_pool_serve.api.dialects import DIALECTS
from trio_pool_serve.api.http.endpoint import Dialect, Endpoint
from trio_pool_serve.config import Config, NetworkConfig
from trio_pool_serve.service import Service

PAGE = Path(__file__).parents[3] / "docs" / "errors-by-dialect.md"
KEY = {"Authorization": "Bearer secret"}
REQUEST_ID = "the-request"

HEAD = """# Errors by dialect

`python -m tests.api.dialects.error_table` writes this page from the responses of a server.
[api.md](api.md#errors) lists all errors.

## Bodies
The response to a request that names an unknown model:

| dialect, route | body |
| --- | --- |
"""

FREQUENT = """
## The most frequent errors
Status and message, for the example of the first route of each dialect:

| dialect, route | request | status | message |
| --- | --- | --- | --- |
"""

ENUMS = """
## Values that a field does not accept
Every field of a body with a fixed set of values, with the value `"other"`; fields within objects are left out:

| dialect, route | field | status | message |
| --- | --- | --- | --- |
"""


def choices_of(hint: Any) -> tuple[str, ...]:
    """Return the strings that a field accepts, empty if it accepts any or none."""
    if get_origin(hint) is Literal:
        return tuple(value for value in get_args(hint) if isinstance(value, str))
    parts = get_args(hint)
    return () if str in parts else tuple(choice for part in parts for choice in choices_of(part))


def enums_of(endpoint: Endpoint[Any, Any]) -> list[str]:
    """Return the top-level fields of a request that accept only some strings."""
    hints = get_type_hints(endpoint.wire)
    return [field.name for field in attrs.fields(endpoint.wire) if choices_of(hints[field.name])]


@attrs.frozen
class Asker:
    """Sends requests to a server of one model with a key."""

    service: Service
    http: httpx.AsyncClient

    async def ask(self, path: str, body: Mapping[str, Any], *, key: bool = True) -> httpx.Response:
        """Return the response to a body."""
        headers = {"X-Request-Id": REQUEST_ID, **(KEY if key else {})}
        return await self.http.post(path.replace("{name}", "org/model"), json=body, headers=headers)

    async def errors(self, endpoint: Endpoint[Any, Any]) -> AsyncIterator[tuple[str, httpx.Response]]:
        """Yield the responses to requests that cannot be answered, with a name each."""
        path, body = endpoint.paths[0], endpoint.example
        yield "without the key", await self.ask(path, body, key=False)
        yield "names an unknown model", await self.ask(path, {**body, "model": "unknown"})
        yield "has no field but `model`", await self.ask(path, {"model": "org/model"})
        with full_queue(self.service):
            yield "while the queue is full", await self.ask(path, body)


@asynccontextmanager
async def asker(folder: Path) -> AsyncIterator[Asker]:
    """Serve a scripted model that can do everything."""
    config = Config(models=(f"org/model={folder}",), network=NetworkConfig(api_key="secret"))
    async with serving(config, ScriptedRunner()) as (service, client):
        serve_as(service, Everything())
        yield Asker(service, client)


def first_endpoint(dialect: Dialect) -> Endpoint[Any, Any]:
    """Return the endpoint that stands for a dialect."""
    return dialect.endpoints[0]


def row(*cells: object) -> str:
    """Return a row of a table."""
    return f"| {' | '.join(str(cell).replace('|', chr(92) + '|') for cell in cells)} |\n"


def message_of(answer: httpx.Response) -> str:
    """Return the message of an error in any dialect; empty for another response."""
    error = answer.json().get("error", "")
    return error if isinstance(error, str) else error["message"]


async def page(folder: Path) -> str:
    """Return the page as Markdown."""
    bodies, frequent, enums = [HEAD], [FREQUENT], [ENUMS]
    async with asker(folder) as asking:
        for dialect in DIALECTS:
            first = first_endpoint(dialect)
            route = f"{dialect.name}, `{first.paths[0]}`"
            async for name, answer in asking.errors(first):
                message = re.sub(r"about [\d.]+ s", "about N s", message_of(answer))
                frequent.append(row(route, name, answer.status_code, message or "an empty response"))
                if "unknown" in name:
                    bodies.append(row(route, f"`{answer.text}`"))
            for endpoint in dialect.endpoints:
                for name in enums_of(endpoint):
                    wrong = ["other"] if name.endswith("_types") else "other"
                    answer = await asking.ask(endpoint.paths[0], {**endpoint.example, name: wrong})
                    route = f"{dialect.name}, `{endpoint.paths[0]}`"
                    enums.append(row(route, f"`{name}`", answer.status_code, message_of(answer)))
    return "".join(bodies + frequent + enums)


async def _write() -> None:
    with tempfile.TemporaryDirectory() as folder:
        PAGE.write_text(await page(write_scripted_folder(Path(folder) / "model")))


if __name__ == "__main__":
    trio.run(_write)
