"""Run a service inside another program: ``python -m tests.server.programs.embedded_service FOLDER``.

Prints as JSON what was set of the process before, and after the service has loaded and used its threads.
"""

import json
import os
import sys

import trio

from tests.server.programs.script import load_scripted, process_settings
from trio_pool_serve.config import Config
from trio_pool_serve.service import Service


async def main(folder: str) -> None:
    before = [await trio.to_thread.run_sync(process_settings), dict(os.environ)]
    service = Service(Config(models=(folder,)), load_scripted)
    async with trio.open_nursery() as nursery:
        await nursery.start(service.run)
        await service.wait_ready()
        for kind in service.offload.statistics():
            await service.offload.run(kind, process_settings)
        nursery.cancel_scope.cancel()
    after = [await trio.to_thread.run_sync(process_settings), dict(os.environ)]
    sys.stdout.write(json.dumps([before, after]))


if __name__ == "__main__":
    trio.run(main, sys.argv[1])
