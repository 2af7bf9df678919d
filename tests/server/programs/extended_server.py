"""``trio-pool-serve serve`` with the examples of ``docs/extending.md``, which are modules that Python finds."""

import sys

from plain import PLAIN
from spread import SPREAD, load
from uncertainty import UNCERTAINTY

from trio_pool_serve import app
from trio_pool_serve.cli import read_config, run
from trio_pool_serve.tasks.pool import TASKS

if __name__ == "__main__":  # worker processes import what started the server
    app.DIALECTS = (*app.DIALECTS, PLAIN)
    TASKS |= {"uncertainty": UNCERTAINTY, "spread": SPREAD}
    sys.exit(run(read_config(sys.argv[1:]), load_runner=load))
