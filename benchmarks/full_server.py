"""``trio-pool-serve serve`` over a runner that is slow and computes nothing: ``full_server.py [-POINT] MODEL [flags]``.

``POINT`` is switched off: one of those at which requests are refused before they reach the queue, or reading the first
request of a connection before it is refused.
"""

import copy
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from benchmarks.engine_rows import InstantRunner
from trio_pool_serve.api.http import overload, task_handler
from trio_pool_serve.cli import read_config, run_until_stopped
from trio_pool_serve.server import contained_connection
from trio_pool_serve.server.acceptor import Acceptor
from trio_pool_serve.server.http_connection import HttpConnection
from trio_pool_serve.server.launcher import serve
from trio_pool_serve.types import Batch, CopiedBatch, Prepare, RunnerFacts

BATCH_S = 3.0


class SlowRunner(InstantRunner):
    """Takes seconds for each batch, and next to no CPU time."""

    def launch(self, batch: Batch) -> CopiedBatch:
        """Return a vector for each row, later."""
        time.sleep(BATCH_S)
        return super().launch(batch)


def load_slow(*_: Any) -> Prepare:
    """Load the runner, with a budget that many batches are made by; engine processes import this by its name."""
    return lambda params: SlowRunner(
        RunnerFacts(max_batch_tokens=params.max_batch_tokens or 4096, dimensions=384, pads=False)
    )


def _replace(owner: Any, name: str, replacement: Any) -> Callable[[], None]:
    return lambda: setattr(owner, name, replacement)


refuse = overload._refuse  # noqa: SLF001


def _unasked(app: Any, config: Any, context: Any, *more: Any) -> HttpConnection:
    """Return a connection that refuses no requests itself."""
    context = copy.copy(context)
    context.refusals = None
    return HttpConnection(app, config, context, *more)


POINTS: Mapping[str, Callable[[], None]] = {
    "on acceptance": _replace(Acceptor, "_answer_first", lambda *_: b""),
    "on connections": _replace(contained_connection, "HttpConnection", _unasked),
    "again": _replace(overload, "KEPT_S", -1.0),
    "reading": _replace(overload, "MAX_LAG_S", -1.0),
    "by length": _replace(overload, "_refuse", lambda *known, **more: len(known) < 3 or refuse(*known, **more)),
    "before thread": _replace(task_handler, "refuse_before_thread", lambda *_: None),
}

if __name__ == "__main__":  # worker processes import what started the server
    arguments = sys.argv[1:]
    if arguments[0].startswith("-"):
        POINTS[arguments.pop(0)[1:]]()
    config = read_config(arguments)
    sys.exit(run_until_stopped(config, serve, config, None, load_slow))
