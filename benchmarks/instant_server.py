"""``trio-pool-serve serve`` over a runner that returns at once: ``instant_server MODEL [flags]``."""

import sys
from typing import Any

from benchmarks.engine_rows import instant
from trio_pool_serve.cli import read_config, run_until_stopped
from trio_pool_serve.server.launcher import serve
from trio_pool_serve.types import Prepare

DIMENSIONS = 768


def load_instant(*_: Any) -> Prepare:
    """Load the runner, whatever the model is; engine processes import this by its name."""
    return lambda _: instant(DIMENSIONS)


if __name__ == "__main__":  # worker processes import what started the server
    from benchmarks import instant_server  # engine processes do not find what is in ``__main__``

    config = read_config(sys.argv[1:])
    sys.exit(run_until_stopped(config, serve, config, None, instant_server.load_instant))
