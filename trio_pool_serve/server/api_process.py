"""An API process: serves HTTP and renders, while engine processes compute. Started by ``ApiWorkers``."""

import logging
import socket
from pathlib import Path

import trio

from trio_pool_serve.config import decode_config, import_plugins
from trio_pool_serve.errors import EngineDeadError, ModelLoadError, unwrap_exception_groups
from trio_pool_serve.process_setup import configure_process
from trio_pool_serve.processes.child_process import leave, open_process_nursery, run_as_child, send_to_parent
from trio_pool_serve.processes.framed_stream import FramedStream, sendable
from trio_pool_serve.processes.large_imports import do_without_torch
from trio_pool_serve.server.api_workers import ApiJob, FromParent, NotServed, Ready, Reload
from trio_pool_serve.server.listener import drain, serve_listeners
from trio_pool_serve.server.tls import open_tls
from trio_pool_serve.service import Service
from trio_pool_serve.telemetry.logs import configure_logging

logger = logging.getLogger(__name__)


async def main(channel: FramedStream[FromParent], job: FromParent) -> int:
    """Serve until the parent sends ``Drain`` or is gone; return the exit status. Cancellation: at once."""
    assert isinstance(job, ApiJob)  # noqa: S101  (the first message)
    config = decode_config(job.config)
    configure_logging(config.logging)
    import_plugins(config)
    do_without_torch()
    service = Service(config, socket_folder=Path(job.socket_folder), api_worker=job.number)
    configure_process(service)
    tls = open_tls(service)
    stop = trio.Event()
    loading = trio.CancelScope()
    try:
        with unwrap_exception_groups(ModelLoadError, EngineDeadError), socket.socket(fileno=job.fd) as listening:

            async def watch_parent() -> None:
                async def wait_for_end() -> str:
                    while await channel.receive() is not None:
                        """A signal to reload has come too late."""
                    return "the parent is gone"

                while (received := await channel.receive()) is not None and isinstance(received[0], Reload):
                    await service.reload()
                loading.cancel(reason="no connections will be accepted")
                # What has been received is ``Drain``, the only other message.
                await drain(service, stop, wait_for_end if received is not None else trio.sleep_forever)
                leave(0)

            async with open_process_nursery() as nursery:
                nursery.start_soon(watch_parent)
                await nursery.start(service.run)
                nursery.start_soon(_report_ready, channel, service)
                if job.joins:
                    with loading:
                        await service.wait_ready()
                await serve_listeners(config, service, listening, stop, tls)
                nursery.cancel_scope.cancel(reason="drained")
    except (ModelLoadError, EngineDeadError) as error:
        await send_to_parent(channel, NotServed(sendable(str(error))))
        return 1
    return 0


async def _report_ready(channel: FramedStream[FromParent], service: Service) -> None:
    await service.wait_ready()
    await send_to_parent(channel, Ready())


if __name__ == "__main__":
    run_as_child(main, FromParent)
