"""``trio-pool-serve engine`` over a scripted runner."""

import sys

from tests.server.programs.script import load_scripted
from trio_pool_serve.cli import run_until_stopped
from trio_pool_serve.command_line.server_commands import read_settings
from trio_pool_serve.processes.large_imports import forbid_torch
from trio_pool_serve.server.engine_server import serve_engine_alone

if __name__ == "__main__":
    forbid_torch()  # nothing here computes, and to import it takes two seconds
    settings = read_settings("engine", sys.argv[1:])
    sys.exit(run_until_stopped(settings.config, serve_engine_alone, settings, load_scripted))
