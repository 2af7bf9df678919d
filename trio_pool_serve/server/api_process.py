"""An API process: serves HTTP and renders, while engine processes compute. Started by ``ApiWorkers``."""

import socket
from functools import partial
from pathlib import Path

import trio

from trio_pool_serve.config import decode_config, import_plugins
from trio_pool_serve.process_setup import configure_process
from trio_pool_serve.processes.child_process import (
    leave,
    open_process_nursery,
    run_as_child,
    send_to_parent,
    wait_for_parent,
)
from trio_pool_serve.processes.framed_stream import FramedStream
from trio_pool_serve.processes.large_imports import forbid_torch
from trio_pool_serve.server.api_workers import ApiJob, FromParent, Ready, Reload
from trio_pool_serve.server.listener import serve_listeners
from trio_pool_serve.server.tls import open_tls
from trio_pool_serve.service import Service
from trio_pool_serve.telemetry.logs import configure_logging


async def main(channel: FramedStream[FromParent], job: ApiJob) -> None:
    """Serve until the parent sends ``Drain`` or has ended. Cancellation: at once."""
    config = decode_config(job.config)
    configure_logging(config.logging)
    import_plugins(config)
    forbid_torch()
    service = Service(config, socket_folder=Path(job.socket_folder), api_worker=job.number)
    configure_process(service)
    tls = open_tls(service)  # before anything is loaded
    stop = trio.Event()
    loading = trio.CancelScope()
    with socket.socket(fileno=job.fd) as listening:

        async def watch_parent() -> None:
            while (received := await channel.receive()) is not None and isinstance(received[0], Reload):
                nursery.start_soon(service.reload)  # draining does not wait for it
            loading.cancel(reason="no connections will be accepted")
            # ``received`` is ``Drain``, or the parent is gone already.
            await service.drain(stop, partial(wait_for_parent, channel) if received else trio.sleep_forever)
            leave(0)

        async def report_ready() -> None:
            await service.wait_ready()
            await send_to_parent(channel, Ready())

        async with open_process_nursery() as nursery:
            nursery.start_soon(watch_parent)
            await nursery.start(service.run)
            nursery.start_soon(report_ready)
            if job.joins:
                with loading:
                    await service.wait_ready()
            await serve_listeners(service, listening, stop, tls)
            nursery.cancel_scope.cancel(reason="drained")


if __name__ == "__main__":
    run_as_child(main, FromParent)
