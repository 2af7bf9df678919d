"""Which key each route needs in each ``--api-key-scope``, requested over a socket: the table of docs/keys-and-tls.md.

``python -m tests.api.http.key_table`` writes the table into the page, for a reader to judge.
"""

import re
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import get_args

import httpx
import trio
from attrs import evolve

from tests.api.serving import key_file_of, serving
from tests.model_folders import write_scripted_folder
from tests.scripted_runner import ScriptedRunner
from trio_pool_serve.api.dialects import DIALECTS, INVOCATIONS
from trio_pool_serve.api.http.endpoint_choice import endpoints_by_path
from trio_pool_serve.api.routes.console import LIVE_PATH, MODELS_PATH, OPEN_ROUTES
from trio_pool_serve.api.routes.openapi import OPERATIONS
from trio_pool_serve.api.routes.operations import PROBE_ROUTES
from trio_pool_serve.config import BatchConfig, Config, KeyScope, ModelChangesConfig, NetworkConfig

PAGE = Path(__file__).parents[3] / "docs" / "keys-and-tls.md"
WRITTEN_BY = "it is written by: python -m tests.api.http.key_table"
SCOPES: tuple[KeyScope, ...] = get_args(KeyScope)
KEYS = {None: {}, "any": {"x-api-key": "plain-key"}, "admin": {"x-api-key": "operator-key"}}

Route = tuple[str, str]

COMPUTING = [("POST", path) for path in endpoints_by_path(DIALECTS)] + [("POST", INVOCATIONS.path)]
OTHER_PATHS = {("GET", "/v1/other"): "other paths that begin with `/v1` or `/v2`", ("GET", "/other"): "other paths"}
"""They stand for paths that no route of the server has, which plugins may serve."""

ROUTES: Sequence[Route] = (*COMPUTING, *OPERATIONS, *OTHER_PATHS)

REASONS: Mapping[str, frozenset[Route]] = {
    "probes: their responses are a state and its reason": PROBE_ROUTES,
    "a file of the console, without data of the server": OPEN_ROUTES,
    "the names of the models, for clients that list them without their key": frozenset(
        ("GET", path) for path in ("/v1/models", "/v1/models/{name}", "/models")
    ),
    "monitoring: it shows load, no inputs": frozenset(("GET", path) for path in ("/metrics", "/load", LIVE_PATH)),
    "computes, as in vLLM": frozenset(route for route in COMPUTING if not route[1].startswith(("/v1", "/v2"))),
    "describes the server and its models": frozenset(
        ("GET", path) for path in ("/info", "/tokenizer_info", "/api/tags", "/api/ps", "/api/version", "/meta",
                                   "/version", "/openapi.json", "/docs", MODELS_PATH)
    ) | {("POST", "/api/show"), ("POST", "/api/pull")},
    "is refused with a message": frozenset({("POST", "/api/generate"), ("POST", "/api/chat")}),
    "as in vLLM; routes of plugins are among them": frozenset({("GET", "/other")}),
}  # fmt: skip
"""Why routes may need no key: each of them is here, in the scopes in which it does not."""


@asynccontextmanager
async def servers(folder: Path, scratch: Path) -> AsyncIterator[Mapping[KeyScope, httpx.AsyncClient]]:
    """Serve a scripted model with every scope, a key without ``admin`` and a key with it; gives the clients."""
    keys = key_file_of(scratch, '[plain]\nkey = "plain-key"\n[operator]\nkey = "operator-key"\nadmin = true\n')
    network = NetworkConfig(api_keys_file=keys)
    changes, batch = ModelChangesConfig(model_api=True), BatchConfig(data_dir=str(scratch / "data"))
    async with AsyncExitStack() as stack:
        clients = {}
        for scope in SCOPES:
            named = evolve(network, api_key_scope=scope)
            config = Config(models=(str(folder),), network=named, model_changes=changes, batch=batch)
            clients[scope] = (await stack.enter_async_context(serving(config, ScriptedRunner())))[1]
        yield clients


async def needed_key(client: httpx.AsyncClient, method: str, path: str) -> str:
    """Return which key a route needs, by the answers to a request without a key and with either key."""
    statuses = []
    for headers in KEYS.values():
        async with client.stream(method, path.replace("{name}", "none"), headers=headers) as answer:  # some never end
            statuses.append(answer.status_code if answer.status_code in (401, 403) else 0)
    return {(0, 0, 0): "none", (401, 0, 0): "any", (401, 403, 0): "admin"}[tuple(statuses)]


def reason_of(route: Route) -> str:
    """Return why a route may need no key. Raises ``ValueError`` unless there is exactly one reason."""
    (reason,) = [reason for reason, routes in REASONS.items() if route in routes]
    return reason


async def needed_keys(clients: Mapping[KeyScope, httpx.AsyncClient]) -> dict[Route, tuple[str, ...]]:
    """Return which key each route needs, in each scope."""
    return {route: tuple([await needed_key(clients[scope], *route) for scope in SCOPES]) for route in ROUTES}


def rows(needed: Mapping[Route, tuple[str, ...]]) -> Iterator[str]:
    """Yield the rows of the table: routes with the same keys and the same reason share one."""
    grouped: dict[tuple[str, ...], list[str]] = {}
    for route, keys in needed.items():
        reason = reason_of(route) if "none" in keys else ""
        method, path = route
        shown = OTHER_PATHS.get(route) or f"`{path if route in COMPUTING else f'{method} {path}'}`"
        grouped.setdefault((*keys, reason), []).append(shown)
    for cells, routes in grouped.items():
        yield f"| {', '.join(routes)} | {' | '.join(cells)} |\n"


def table(needed: Mapping[Route, tuple[str, ...]]) -> str:
    """Return the table as Markdown."""
    scopes = " | ".join(f"`{scope}`" for scope in SCOPES)
    return f"| route | {scopes} | why a scope may leave it open |\n| --- |{' --- |' * len(SCOPES)} --- |\n" + "".join(
        rows(needed)
    )


def table_in(page: str) -> str:
    """Return the table that a page has."""
    (found,) = re.findall(r"^\| route \| .*\n(?:\|.*\n)+", page, re.MULTILINE)
    return found


async def _write() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        folder = write_scripted_folder(Path(scratch) / "model")
        async with servers(folder, Path(scratch)) as clients:
            before, _, after = PAGE.read_text().partition(table_in(PAGE.read_text()))
            PAGE.write_text(before + table(await needed_keys(clients)) + after)


if __name__ == "__main__":
    trio.run(_write)
