"""An engine process: one model, one runner, and a socket for API processes. Started by the supervisor."""

import logging
import os
import tempfile
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from pkgutil import resolve_name

import trio
from attrs import asdict

from trio_pool_serve.config import decode_config, import_plugins
from trio_pool_serve.engine.places.supervisor import Alive, EngineJob, Loaded, LoadingStep, ToEngineProcess
from trio_pool_serve.engine.process_placement import idle_launches_of
from trio_pool_serve.engine.remote.connectors import HostAddress
from trio_pool_serve.engine.remote.device_server import DeviceServer, EngineListener
from trio_pool_serve.engine.remote.greeting import LinkKeys
from trio_pool_serve.errors import EngineDeadError, ModelLoadError, unwrap_exception_groups
from trio_pool_serve.models.loading.runner_loader import load_model
from trio_pool_serve.processes.allocator import freeze_objects, prepare_for_loading
from trio_pool_serve.processes.child_process import TICKS, leave, open_process_nursery, run_as_child, send_to_parent
from trio_pool_serve.processes.framed_stream import FramedStream, sendable
from trio_pool_serve.processes.socket_folder import BACKLOG, serve_at
from trio_pool_serve.runner.memory_share import load_with_share
from trio_pool_serve.runner.shared_cores import SharedCores, SharingRunner
from trio_pool_serve.telemetry.logs import configure_logging
from trio_pool_serve.telemetry.metrics import Metrics, process_gauges
from trio_pool_serve.telemetry.snapshots import (
    Snapshot,
    engine_process_name,
    families_of,
    families_of_replica,
    process_usage,
    serve_snapshots,
)
from trio_pool_serve.telemetry.start_display import end_display, show_steps_with
from trio_pool_serve.threads.offload import Offload, limit_openmp_spinning, relative_niceness
from trio_pool_serve.types import Prepare

logger = logging.getLogger(__name__)


SNAPSHOT_S = 2.0
"""Interval between snapshots to the parent, if the server is on another machine. They show that this one is alive."""


async def main(channel: FramedStream[ToEngineProcess], job: EngineJob) -> None:
    """Load the model, then compute until the parent ends or sends ``Leave``. Raises ``ModelLoadError``.

    Cancellation: at once.
    """
    limit_openmp_spinning()  # before torch is imported, as ``prepare_for_loading``
    prepare_for_loading()
    tempfile.tempdir = job.socket_folder or None  # what is left there when this process ends goes with the folder
    config = decode_config(job.config)
    replica, labels = job.replica, job.replica.labels
    configure_logging(config.logging, {"model": replica.model, **labels} if replica.processes > 1 else {})
    import_plugins(config)
    offload = Offload(
        launch=1,
        idle_launches=idle_launches_of(config, replica.processes if job.cores else 1),
        niceness=relative_niceness(),
        cores_shared_by=replica.processes if job.cores else 1,
    )
    metrics = Metrics()
    metrics.add_gauges(process_gauges)
    source = next(source for source in config.sources if source.name == replica.model)

    def load() -> Prepare:
        load_alone = partial(load_model, config, source, resolve_name(job.loader), offload)
        prepare = load_with_share(load_alone, job.memory, job.sharers) if job.memory is not None else load_alone()
        if not job.cores:
            return prepare
        cores = SharedCores.open(Path(job.cores), replica.process, replica.processes)
        return lambda params: SharingRunner(prepare(params), [cores])

    zone = "" if job.key else config.hosts.zone  # known only on the API processes' machine
    engine = DeviceServer(
        config.scheduling, load=load, offload=offload, metrics=metrics.of_engine(replica.model), zone=zone
    )

    def snapshot() -> Snapshot:
        families, load = families_of(metrics.registry), asdict(engine.statistics())
        models = {replica.model: {**load, "replicas": {labels["replica"]: load}}}
        processes = {engine_process_name(replica.model, labels["replica"]): process_usage()}
        return Snapshot(families + families_of_replica(families, labels), {"models": models, "processes": processes})

    async def serve(listeners: list[trio.SocketListener]) -> None:
        await engine.dispatcher.wait_ready()  # connections wait until then
        await trio.serve_listeners(engine.serve, listeners)

    try:
        # ModelLoadError first: wait_ready raises EngineDeadError because of it.
        with unwrap_exception_groups(ModelLoadError, EngineDeadError):
            async with open_process_nursery() as nursery:
                leaving = trio.Event()
                nursery.start_soon(_watch_parent, channel, leaving, engine, nursery.cancel_scope)
                if not job.key:  # its parent is on this machine
                    await nursery.start(serve_at, Path(job.address), serve)
                    show_steps_with(partial(_tell_parent, channel, nursery, trio.lowlevel.current_trio_token()))
                nursery.start_soon(engine.run)
                await engine.dispatcher.wait_ready()
                end_display()
                freeze_objects()
                loaded = partial(Loaded, sendable(str(engine.facts)), pid=os.getpid())
                if not job.key:
                    await send_to_parent(channel, loaded(address=job.address))
                    nursery.start_soon(serve_snapshots, Path(job.socket_folder), snapshot)
                    nursery.start_soon(_keep_sending, channel, Alive, config.scheduling.silence_timeout_s / TICKS)
                else:
                    listeners = await trio.open_tcp_listeners(0, host=job.address, backlog=BACKLOG)
                    address = HostAddress(job.address, listeners[0].socket.getsockname()[1])
                    await send_to_parent(channel, loaded(address=str(address)))
                    nursery.start_soon(_keep_sending, channel, snapshot, SNAPSHOT_S)
                    await EngineListener(engine, LinkKeys(keys=[job.key.encode()])).serve_until(leaving, listeners)
                    nursery.cancel_scope.cancel(reason="all API processes have left")
    except EngineDeadError as error:
        logger.critical("%s", error)
        leave(1)


async def _watch_parent(
    channel: FramedStream[ToEngineProcess], leaving: trio.Event, engine: DeviceServer, everything: trio.CancelScope
) -> None:
    while await channel.receive() is not None:
        leaving.set()
    if engine.state == "loading":
        leave(0)  # loading cannot be cancelled
    everything.cancel(reason="the parent is gone")


def _tell_parent(
    channel: FramedStream[ToEngineProcess], nursery: trio.Nursery, token: trio.lowlevel.TrioToken, step: str
) -> None:
    """Send a step from any thread, without waiting: the caller may hold the lock with which the event loop logs."""

    def begin() -> None:
        with suppress(RuntimeError):  # the process is ending
            nursery.start_soon(send_to_parent, channel, LoadingStep(sendable(step)))

    with suppress(trio.RunFinishedError):
        token.run_sync_soon(begin)


async def _keep_sending(
    channel: FramedStream[ToEngineProcess], make: Callable[[], Alive | Snapshot], every_s: float
) -> None:
    while True:
        await send_to_parent(channel, make())
        await trio.sleep(every_s)


if __name__ == "__main__":
    run_as_child(main, ToEngineProcess)
