"""The process that talks to Ray for the server. Started by ``RayPlacement``."""

import os
import sys
from pathlib import Path

import trio

from trio_pool_serve.config import decode_config
from trio_pool_serve.engine.places.ray_places import ActorPlaces, Connected, RayJob
from trio_pool_serve.processes.child_process import run_as_child, send_to_parent, wait_for_parent
from trio_pool_serve.processes.framed_stream import FramedStream
from trio_pool_serve.telemetry.logs import configure_logging
from trio_pool_serve.telemetry.snapshots import serve_snapshots


async def main(channel: FramedStream[RayJob], job: RayJob) -> None:
    """Place engine processes until the parent ends. Cancellation: the actors are ended."""
    config, folder = decode_config(job.config), Path(job.socket_folder)
    configure_logging(config.logging)
    if str(Path.cwd()) not in sys.path:
        os.chdir("/")  # Ray's workers import from the current folder of the process that connects
    places = ActorPlaces(config, job.loader, folder, key=job.key)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_end_with_parent, channel, nursery.cancel_scope)
        await nursery.start(places.run)
        nursery.start_soon(serve_snapshots, folder, places.snapshot)
        await send_to_parent(channel, Connected())


async def _end_with_parent(channel: FramedStream[RayJob], everything: trio.CancelScope) -> None:
    await wait_for_parent(channel)
    everything.cancel(reason="the parent is gone")


if __name__ == "__main__":
    run_as_child(main, RayJob)
