"""The listening socket, and the listener on it, which is restarted when it crashes."""

import contextlib
import logging
import resource
import socket
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import trio
from hypercorn.config import Config as HypercornConfig

from trio_pool_serve.app import create_app
from trio_pool_serve.config import Config, NetworkConfig
from trio_pool_serve.processes.restart_backoff import RestartBackoff
from trio_pool_serve.server.acceptor import refuse_rest, serve_app
from trio_pool_serve.server.server_context import ConnectionLimits, Connections, ServerContext
from trio_pool_serve.server.systemd import take_passed_socket
from trio_pool_serve.server.tls import Certificates
from trio_pool_serve.service import Service

logger = logging.getLogger(__name__)

BACKLOG = 2048

RESTART_PAUSES_S = (0.0, 0.01, 0.05, 0.1, 0.25)
"""Well under a second: the models are loaded and the socket is open, so clients only wait."""

STABLE_AFTER_S = 10.0

RESERVED_FILES = 256
"""File descriptors that are not for connections, refused ones included: they are for models, child processes, uploads,
images that are fetched. At most half of all."""


def open_listening_socket(network: NetworkConfig) -> socket.socket:
    """Return a bound and listening socket, which outlives the listeners that serve on it."""
    path = network.unix_socket
    if path is not None:
        _remove_dead_socket(path)
        listening = socket.socket(socket.AF_UNIX)
        listening.bind(str(path))
    else:
        family = socket.AF_INET6 if ":" in network.host else socket.AF_INET
        listening = socket.socket(family)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((network.host, network.port))
    listening.listen(BACKLOG)
    listening.setblocking(False)  # noqa: FBT003  (the standard library's own signature)
    return listening


def _remove_dead_socket(path: Path) -> None:
    """Remove the socket of a killed server; one that is served and other files stay, so that binding fails."""
    if not path.is_socket():
        return
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()


def url_of(listening: socket.socket, network: NetworkConfig) -> str:
    """Return the URL of a listening socket; ``unix:PATH`` for a Unix socket."""
    name = listening.getsockname()
    if listening.family == socket.AF_UNIX:
        return f"unix:{name}"
    host = f"[{name[0]}]" if listening.family == socket.AF_INET6 else name[0]
    return f"{'http' if network.ssl_certfile is None else 'https'}://{host}:{name[1]}"


def hypercorn_config(config: Config) -> HypercornConfig:
    """Return hypercorn's settings for the connections of a listener."""
    settings = HypercornConfig()
    settings.graceful_timeout = config.time_limits.drain_timeout_s
    settings.keep_alive_timeout = 75
    settings.keep_alive_max_requests = 1_000_000  # the default of 1000 closes busy connections
    settings.include_server_header = False
    settings.errorlog = logging.getLogger("hypercorn.error")
    return settings


async def serve_listeners(
    config: Config,
    service: Service,
    listening: socket.socket,
    stop: trio.Event,
    tls: Certificates | None = None,
) -> None:
    """Serve on the socket until ``stop`` is set, and drain then; with a new listener whenever one crashes.

    Each listener has an app of its own.

    Cancellation: at once, but for what hypercorn is writing.
    """
    settings = hypercorn_config(config)
    connections = connections_of(service)
    backoff = RestartBackoff(RESTART_PAUSES_S, STABLE_AFTER_S)
    while not stop.is_set():
        began = trio.current_time()
        try:
            # A new app each time: quart's cannot start twice.
            app, context = create_app(config, service), ServerContext(connections=connections)
            await serve_app(app, settings, context, listening, stop, tls=tls, refusing=app)
        except Exception as error:
            service.metrics.listener_restarts.inc()
            logger.warning("the listener crashed; it restarts", exc_info=error)
            await trio.sleep(backoff.next_pause_s(trio.current_time() - began))


def connections_of(service: Service) -> Connections:
    """Return the count of a process's connections, with its limits; the service's metrics show it."""
    metrics = service.metrics
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    room = files - min(RESERVED_FILES, files // 2)
    max_refused = min(ConnectionLimits().max_refused, room // 8)
    limits = ConnectionLimits(
        client_timeout_s=service.config.time_limits.client_timeout_s,
        max_connections=max(1, min(ConnectionLimits().max_connections, room - max_refused)),
        max_refused=max_refused,
    )
    connections = Connections(limits, metrics.connections_refused.inc)
    metrics.add_gauges(
        lambda: {"connections": {"open": connections.statistics().open, "limit": limits.max_connections}}
    )
    return connections


def raise_file_limit() -> None:
    """Let this process, and those that it starts, open as many files as the system allows them."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # macOS has a lower one of its own
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


async def drain(service: Service, stop: trio.Event, wait_for_more: Callable[[], Awaitable[str]]) -> None:
    """Refuse new requests, those on new connections too, and wait while running ones finish.

    Returns when that takes longer than ``--drain-timeout-s`` or ``wait_for_more()`` returns a reason to exit at once.

    The caller exits then; it is cancelled when all requests have finished. Cancellation: at once.
    """
    limit_s = service.config.time_limits.drain_timeout_s
    logger.info("draining, for at most %g s", limit_s)
    service.draining = True
    stop.set()
    reason = "the drain took too long"
    with trio.move_on_after(limit_s):
        reason = await wait_for_more()
    # hypercorn shields its writes: a client that does not read would keep the process alive for ever.
    logger.warning(
        "exiting with %d rows unfinished: %s",
        sum(served.engine.statistics().queued_rows for served in service.served.values()),
        reason,
    )


@contextlib.contextmanager
def open_listening(network: NetworkConfig) -> Iterator[socket.socket]:
    """Listen in the block; who has connected by its end and was not accepted is refused.

    A socket that systemd has passed is used instead of one of the settings. It stays as it is at the end, and who waits
    there waits for the next process.
    """
    passed = take_passed_socket()
    if passed is not None:
        passed.setblocking(False)  # noqa: FBT003  (the standard library's own signature)
        with passed:
            yield passed
        return
    with open_listening_socket(network) as listening:
        try:
            yield listening
            refuse_rest(listening, is_plain=network.ssl_certfile is None)
        finally:
            if network.unix_socket is not None:
                network.unix_socket.unlink(missing_ok=True)
