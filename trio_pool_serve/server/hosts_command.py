"""``trio-pool-serve hosts``: shows and changes the engine hosts of a running server."""

from typing import Annotated

import httpx
from cyclopts import App, Parameter
from rich.console import Console
from rich.table import Table
from rich.text import Text

TIMEOUT_S = 10.0

Url = Annotated[str, Parameter(help="URL of the server.")]
Key = Annotated[str | None, Parameter(help="API key of the server. A key of `--api-keys-file` needs `admin`.")]
Host = Annotated[str, Parameter(help="`HOST:PORT` of the engine.")]

hosts_app = App(name="hosts", help="List, add or drain the engine hosts of a running server.")

DEFAULT_URL = "http://127.0.0.1:8000"

COLUMNS = ("address", "state", "model", "zone", "waiting_rows", "waiting_tokens", "tokens_per_s", "losses", "reason")


@hosts_app.command(name="list")
def list_hosts(*, url: Url = DEFAULT_URL, api_key: Key = None) -> int:
    """List the engines of `--engine-hosts`, as seen by the API process that responds."""
    return _ask("GET", "/engine_hosts", None, url, api_key)


@hosts_app.command
def add(host: Host, *, url: Url = DEFAULT_URL, api_key: Key = None) -> int:
    """Add an engine until the server exits, or reactivate a drained one."""
    return _ask("POST", "/engine_hosts", host, url, api_key)


@hosts_app.command
def drain(host: Host, *, url: Url = DEFAULT_URL, api_key: Key = None) -> int:
    """Send no more inputs to an engine, which computes its remaining inputs."""
    return _ask("POST", "/engine_hosts/drain", host, url, api_key)


def _ask(method: str, path: str, host: str | None, url: str, api_key: str | None) -> int:
    console = Console(soft_wrap=True, highlight=False)
    try:
        response = httpx.request(
            method,
            url.rstrip("/") + path,
            json=None if host is None else {"host": host},
            headers={} if api_key is None else {"Authorization": f"Bearer {api_key}"},
            timeout=TIMEOUT_S,
        )
        answer = response.json()
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        console.print(f"trio-pool-serve: {url} does not respond: {error}", style="red", markup=False)
        return 1
    if response.status_code != httpx.codes.OK:
        message = answer.get("error", {}).get("message", answer) if isinstance(answer, dict) else answer
        console.print(f"trio-pool-serve: {response.status_code}: {message}", style="red", markup=False)
        return 1
    table = Table("host", *(column.replace("_", " ") for column in COLUMNS), box=None)
    for of_host in answer["hosts"]:
        for engine in of_host["engines"] or [{"state": "unresolved"}]:
            cells = (engine.get(column) for column in COLUMNS)
            # As Text: IPv6 addresses would be markup.
            table.add_row(Text(of_host["host"]), *(Text("" if cell is None else str(cell)) for cell in cells))
    console.print(table)
    return 0
