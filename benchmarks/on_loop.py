"""Our server with offloading off: ``python -m benchmarks.on_loop MODEL… [flags…]``, those of our own command."""

import sys

import trio

from trio_pool_serve.cli import read_config
from trio_pool_serve.server.launcher import serve
from trio_pool_serve.service import Service
from trio_pool_serve.telemetry.logs import configure_logging
from trio_pool_serve.threads.offload import Offload


def main() -> None:
    """Serve until SIGTERM, with everything that would go to a thread or a process on the event loop instead."""
    config = read_config(sys.argv[1:])
    configure_logging(config.logging)
    trio.run(serve, config, Service(config, offload=Offload(in_threads=False)))


if __name__ == "__main__":
    main()
