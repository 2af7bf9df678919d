"""The process of ``trio-pool-serve engine``: one model, computed for API processes of other machines."""

import logging
from collections.abc import Mapping
from functools import partial
from secrets import token_hex
from typing import Any

import trio
from hypercorn.config import Config as HypercornConfig
from hypercorn.trio import serve as serve_by_hypercorn
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from trio_pool_serve.api.http.response import HttpResponse
from trio_pool_serve.engine.process_placement import idle_launches_of, replicas_of
from trio_pool_serve.engine.remote.connectors import HostAddress
from trio_pool_serve.engine.remote.device_server import DeviceServer, EngineListener
from trio_pool_serve.engine.remote.greeting import LinkKeys
from trio_pool_serve.errors import EngineDeadError, ModelLoadError, unwrap_exception_groups
from trio_pool_serve.models.files.model_digest import digest_of
from trio_pool_serve.models.folder import locate_model
from trio_pool_serve.models.loading.runner_loader import LocalRunners, RunnerLoader, load_transformer
from trio_pool_serve.processes.allocator import freeze_objects, prepare_for_loading
from trio_pool_serve.processes.child_process import leave
from trio_pool_serve.processes.signals import watch_ends, watch_reloads
from trio_pool_serve.server.engine_settings import EngineServerConfig
from trio_pool_serve.server.systemd import STOPPING, notify
from trio_pool_serve.telemetry.metrics import Metrics, process_gauges, sample_loop_lag
from trio_pool_serve.telemetry.start_display import end_display
from trio_pool_serve.threads.offload import Offload, limit_openmp_spinning, relative_niceness

logger = logging.getLogger(__name__)

BACKLOG = 1024

IDENTITY = token_hex(8)
"""Random id of this process."""


async def serve_engine_alone(settings: EngineServerConfig, load_runner: RunnerLoader = load_transformer) -> None:
    """Load the model, then compute for API processes until SIGTERM or SIGINT, then drain.

    To drain, it asks the API processes to send no more rows, and all rows sent before are computed; a second signal,
    or ``--drain-timeout-s``, ends the process at once. Raises ``ModelLoadError``, ``EngineDeadError``, or ``OSError``
    if it cannot listen. Cancellation: at once; API processes see their connections end.
    """
    config = settings.config
    limit_openmp_spinning()  # before torch is imported
    prepare_for_loading()
    (source,) = config.sources
    assert config.hosts.key_file is not None  # noqa: S101  (the command line requires it)
    keys = LinkKeys(config.hosts.key_file)
    offload = Offload(
        launch=replicas_of(config),
        may_launch_more=config.processes.replicas is None,
        idle_launches=idle_launches_of(config),
        niceness=relative_niceness(),
    )
    metrics = Metrics()
    engine = DeviceServer(
        config.scheduling,
        load=partial(LocalRunners(config, offload).load, source, load_runner),
        offload=offload,
        metrics=metrics.of_engine(source.name),
        zone=config.hosts.zone,
    )
    with unwrap_exception_groups(ModelLoadError, EngineDeadError):
        async with trio.open_nursery() as nursery:
            ending = await nursery.start(watch_ends)
            await nursery.start(watch_reloads, partial(offload.reload, "keys", keys.read, keys.path))
            nursery.start_soon(sample_loop_lag, metrics.loop_lag)
            try:
                await offload.run("load", keys.read)
            except ValueError as error:
                raise ModelLoadError(str(error)) from error
            path = await offload.run("load", partial(locate_model, source.location, source.loading))
            digest = await offload.run("load", partial(digest_of, path, source.loading))
            engine.about = {"model": source.name, **digest._asdict(), "identity": IDENTITY}
            listener = EngineListener(engine, keys)
            metrics.add_gauges(
                lambda: {
                    **process_gauges(),
                    "api_processes": {"connected": len(engine.connections), "refused": listener.refused},
                }
            )
            if settings.probe_listen is not None:
                nursery.start_soon(_serve_probes, settings.probe_listen, engine, metrics, ending)
            nursery.start_soon(engine.run)
            nursery.start_soon(_leave_while_loading, engine, ending)
            await engine.dispatcher.wait_ready()
            logger.info("loaded in %.1f s: %s: %s", engine.memory.loading_s, source.name, engine.facts)
            freeze_objects()
            await _serve_until_signal(settings, listener, ending)
            nursery.cancel_scope.cancel(reason="drained")


async def _serve_until_signal(settings: EngineServerConfig, listener: EngineListener, ending: trio.Event) -> None:
    try:
        listeners = await trio.open_tcp_listeners(settings.listen.port, host=settings.listen.host, backlog=BACKLOG)
    except OSError as error:
        raise OSError(f"Cannot listen on --listen {settings.listen}: {error.strerror or error}.") from error
    timeout_s = settings.config.time_limits.drain_timeout_s
    async with trio.open_nursery() as nursery:
        nursery.start_soon(listener.serve_until, ending, listeners, timeout_s)
        end_display()
        logger.info("listening on %s for API processes", settings.listen)
        notify("READY=1", f"STATUS=computing on {settings.listen}")
        await ending.wait()
        notify(*STOPPING)
        logger.info("draining, for at most %g s: %d API processes", timeout_s, len(listener.server.connections))


async def _leave_while_loading(engine: DeviceServer, ending: trio.Event) -> None:
    """Exit at the first signal if the model is still being loaded, which cannot be cancelled."""
    await ending.wait()
    if engine.state == "loading":
        leave(0)


async def _serve_probes(address: HostAddress, engine: DeviceServer, metrics: Metrics, ending: trio.Event) -> None:
    """Serve ``/livez``, ``/readyz`` and ``/metrics`` over HTTP, forever.

    Raises ``ModelLoadError`` if it cannot listen there. Cancellation: at once.
    """
    settings = HypercornConfig.from_mapping(
        bind=[str(address)], include_server_header=False, errorlog=None, accesslog=None
    )
    app: Any = partial(_answer_probe, engine, metrics, ending)
    try:
        await serve_by_hypercorn(app, settings, shutdown_trigger=trio.sleep_forever, mode="asgi")
    except* OSError as errors:
        raise ModelLoadError(f"--probe-listen {address} cannot be listened on: {errors.exceptions[0]}") from errors


async def _answer_probe(
    engine: DeviceServer, metrics: Metrics, ending: trio.Event, scope: Mapping[str, Any], _: Any, send: Any
) -> None:
    """Respond as an ASGI app."""
    if scope["type"] == "lifespan":
        raise NotImplementedError("There is nothing to start: ASGI servers go on without a lifespan then.")
    path, state = scope.get("path"), engine.state
    statuses = {"/livez": "dead" if state == "dead" else "alive", "/readyz": "draining" if ending.is_set() else state}
    if path == "/metrics":
        response = HttpResponse(generate_latest(metrics.registry), CONTENT_TYPE_LATEST)
    elif path in statuses:
        status = statuses[path]
        response = HttpResponse.json({"status": status}, 200 if status in ("alive", "ready") else 503)
    else:
        response = HttpResponse.json({"error": "not found"}, 404)
    await response.send(send)
