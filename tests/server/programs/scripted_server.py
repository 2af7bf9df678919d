"""``trio-pool-serve serve`` over a scripted runner."""

import os
import sys

from hypercorn.trio.tcp_server import TCPServer

from tests.server.programs.script import load_scripted
from trio_pool_serve.cli import read_config, run_until_stopped
from trio_pool_serve.config import import_plugins
from trio_pool_serve.engine.places import supervisor
from trio_pool_serve.processes.large_imports import forbid_torch
from trio_pool_serve.server import listener
from trio_pool_serve.server.launcher import serve
from trio_pool_serve.service import Service

if __name__ == "__main__":  # worker processes import what started the server
    if "SCRIPT_UNCONTAINED" in os.environ:
        listener.RefusalWriter = lambda *_: None  # hypercorn's connections take nothing that has been received
        listener.serve_connection = lambda *arguments, **_: TCPServer(*arguments[:5])
    supervisor.MAX_RESTARTS = int(os.environ.get("SCRIPT_MAX_RESTARTS", supervisor.MAX_RESTARTS))
    forbid_torch()  # nothing here computes, and to import it takes two seconds
    config = read_config(sys.argv[1:])
    import_plugins(config)
    if config.processes.engine in ("process", "ray") or config.hosts.engine_hosts:
        sys.exit(run_until_stopped(config, serve, config, None, load_scripted))
    sys.exit(run_until_stopped(config, serve, config, Service(config, load_scripted)))
