"""``trio-pool-serve engine`` over a scripted runner."""

import sys

from tests.server.programs.script import load_scripted
from trio_pool_serve.cli import run_command
from trio_pool_serve.processes.large_imports import forbid_torch

if __name__ == "__main__":
    forbid_torch()  # nothing here computes, and to import it takes two seconds
    sys.exit(run_command("engine", sys.argv[1:], load_scripted))
