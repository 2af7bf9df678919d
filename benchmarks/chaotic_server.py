"""``trio-pool-serve serve`` over a runner that fails: ``python -m benchmarks.chaotic_server MODEL… [flags]``."""

import sys

from benchmarks.chaotic_runner import load_chaotic
from trio_pool_serve.cli import read_config, run_until_stopped
from trio_pool_serve.server.launcher import serve

if __name__ == "__main__":  # worker processes import what started the server
    config = read_config(sys.argv[1:])
    sys.exit(run_until_stopped(config, serve, config, None, load_chaotic))
