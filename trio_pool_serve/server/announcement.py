"""The announcement of a server that is ready: its address, how its models are computed, and a request to copy."""

import logging
from collections.abc import Mapping
from ipaddress import ip_address
from urllib.parse import urlsplit

from trio_pool_serve import __version__
from trio_pool_serve.access.api_keys import ApiKeys
from trio_pool_serve.config import Config
from trio_pool_serve.models.model_kind import AnyModelFolder
from trio_pool_serve.server.systemd import notify
from trio_pool_serve.telemetry.logs import logs_json
from trio_pool_serve.telemetry.start_display import end_display
from trio_pool_serve.types import PoolingTask

logger = logging.getLogger(__name__)

EXAMPLES: Mapping[PoolingTask, tuple[str, str]] = {
    "embed": ("/v1/embeddings", '{"input": "Hello, world"}'),
    "score": ("/v1/rerank", '{"query": "Who owns a task?", "documents": ["A nursery.", "A thread."]}'),
    "classify": ("/v1/classify", '{"input": "Hello, world"}'),
    "sparse_embed": ("/embed_sparse", '{"inputs": "Hello, world"}'),
    "token_classify": ("/pooling", '{"input": "Hello, world", "task": "token_classify"}'),
}
"""Path and body of an example request for each task; the first one that the model supports is printed."""

NO_KEY = "No API key: anyone who reaches the port can use it."


def announce(config: Config, folder: AnyModelFolder, url: str, descriptions: Mapping[str, str]) -> None:
    """Tell systemd, and the terminal or the log, that the server is ready at ``url``.

    ``folder`` is the first model's; ``descriptions`` are, by name, how models are computed.
    """
    names = [source.name for source in config.sources]
    notify("READY=1", f"STATUS=serving {', '.join(names)} on {url}")
    end_display()
    is_open = not (ApiKeys(config).are_needed or config.network.ssl_ca_certs) and not _is_local(url)
    if logs_json(config.logging):
        logger.info("ready", extra={"models": names, "url": url, "version": __version__})
        if is_open:
            logger.warning(NO_KEY)
        return
    from rich.console import Console  # imported here: 20 ms, once the server is ready

    console = Console(stderr=True, soft_wrap=True, highlight=False)
    console.print(f"[bold green]ready[/]  trio-pool-serve {__version__} on [bold]{url}[/]")
    # A server that listens on all addresses is reached at the loopback address.
    reached = url.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:")
    if not url.startswith("unix:"):
        console.print(f"  Console   {reached}/console\n  API docs  {reached}/docs", markup=False)
    other = "on other machines" if config.processes.engine in ("hosts", "ray") else "loaded when it is first used"
    for name in names:
        console.print(f"  Model     {name}: {descriptions.get(name, other)}", markup=False)
    console.print(f"Try:\n  {example_request(config, folder, reached)}", markup=False)
    if is_open:
        console.print(NO_KEY, style="yellow")


def example_request(config: Config, folder: AnyModelFolder, url: str) -> str:
    """Return a command that sends a request to a server, with a placeholder for the key."""
    path, body = next(example for task, example in EXAMPLES.items() if task in folder.spec.tasks)
    socket = url.removeprefix("unix:")
    target = url + path if socket == url else f"--unix-socket {socket} http://localhost{path}"
    key = " -H 'Authorization: Bearer KEY'" if ApiKeys(config).are_needed else ""
    return f"curl -sS {target} -H 'Content-Type: application/json'{key} -d '{body}'"


def _is_local(url: str) -> bool:
    """Return whether only this machine can reach a URL."""
    return url.startswith("unix:") or ip_address(urlsplit(url).hostname or "").is_loopback
