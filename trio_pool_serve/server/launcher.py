"""The launcher, the process of ``trio-pool-serve serve``: signals, the listening socket, child processes."""

import logging
from collections.abc import Mapping
from functools import partial

import trio

from trio_pool_serve.config import Config
from trio_pool_serve.errors import EngineDeadError, ModelLoadError, unwrap_exception_groups
from trio_pool_serve.models.folder import open_model_folder
from trio_pool_serve.models.loading.runner_loader import RunnerLoader, load_transformer, loader_name
from trio_pool_serve.process_setup import configure_process, place_engines
from trio_pool_serve.processes.child_process import leave, open_process_nursery
from trio_pool_serve.processes.signals import watch_ends, watch_reloads
from trio_pool_serve.server.announcement import announce
from trio_pool_serve.server.api_workers import serve_by_workers
from trio_pool_serve.server.listening_socket import open_listening, raise_file_limit, url_of
from trio_pool_serve.server.systemd import STOPPING, feed_watchdog, notify
from trio_pool_serve.server.tls import Certificates, open_tls
from trio_pool_serve.service import Service
from trio_pool_serve.telemetry.start_display import report_phase
from trio_pool_serve.threads.offload import Offload

logger = logging.getLogger(__name__)


async def serve(config: Config, service: Service | None = None, load_runner: RunnerLoader = load_transformer) -> None:
    """Serve until SIGTERM or SIGINT, then drain.

    Without ``service``, one is made from the settings, with runners from ``load_runner``, which must be a function at
    the top level of a module. Raises ``ModelLoadError`` or ``EngineDeadError``. The process exits at once at a second
    signal, or if the drain takes longer than ``--drain-timeout-s``. Cancellation: at once, as after a drain.
    """
    notify("STATUS=loading models")
    report_phase("Starting")
    raise_file_limit()
    Certificates.of(config.network, Offload())  # raises before anything is started
    with unwrap_exception_groups(ModelLoadError, EngineDeadError):
        if service is not None:
            await _serve_alone(config, service)
            return
        config, gpus = await place_engines(config)
        if config.processes.api_workers > 1:
            await serve_by_workers(config, loader_name(load_runner), partial(_announce_workers, config), gpus)
        else:
            await _serve_alone(config, Service(config, load_runner, gpus=gpus))


async def _serve_alone(config: Config, service: Service) -> None:
    """Serve HTTP in this process."""
    # Imported here: the parent of API workers does not need it, which saves a third of its memory.
    from trio_pool_serve.server.listener import serve_listeners

    configure_process(service)
    tls = open_tls(service)  # before anything is loaded
    stop = trio.Event()
    with open_listening(config.network) as listening:
        async with open_process_nursery() as nursery:
            nursery.start_soon(_drain_at, await nursery.start(watch_ends), service, stop)
            if config.network.ssl_certfile or config.network.api_keys_file or config.hosts.engine_hosts:
                # Otherwise SIGHUP ends the server, as by default.
                await nursery.start(watch_reloads, service.reload)
            await nursery.start(service.run)
            nursery.start_soon(_announce, service, url_of(listening, config.network))
            await serve_listeners(service, listening, stop, tls)
            nursery.cancel_scope.cancel(reason="drained")


async def _drain_at(ending: trio.Event, service: Service, stop: trio.Event) -> None:
    """Drain at the first signal; exit if that takes too long."""
    await ending.wait()
    notify(*STOPPING)
    await service.drain(stop)
    leave(0)


async def _announce(service: Service, url: str) -> None:
    """Announce the service once it is ready; notify systemd then, and its watchdog from then on.

    Cancellation: at once; nothing is printed.
    """
    try:
        await service.wait_ready()
    except EngineDeadError:
        return  # ``Service.run`` raises the reason
    announce(service.config, service.models.folder_of(), url, service.models.descriptions)
    await feed_watchdog(service.snapshots, service.config.scheduling.batch_timeout_s)


def _announce_workers(config: Config, url: str, descriptions: Mapping[str, str]) -> None:
    folders = [open_model_folder(source.location, source.loading) for source in config.sources]
    for source, folder in zip(config.sources, folders, strict=True):
        if folder.spec.assumption:
            logger.warning("%s: %s", source.name, folder.spec.assumption)
    announce(config, folders[0], url, descriptions)
