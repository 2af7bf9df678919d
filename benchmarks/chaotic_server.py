"""``trio-pool-serve serve`` over a runner that fails: ``python -m benchmarks.chaotic_server MODEL… [flags]``."""

import sys

from benchmarks.chaotic_runner import load_chaotic
from trio_pool_serve.cli import read_config, run

if __name__ == "__main__":  # worker processes import what started the server
    sys.exit(run(read_config(sys.argv[1:]), load_runner=load_chaotic))
