"""``trio-pool-serve bench``: sends requests to servers and shows how fast they respond."""

import signal
from functools import partial
from pathlib import Path
from typing import Annotated

import trio
from cyclopts import Parameter

from trio_pool_serve.config.help import help_
from trio_pool_serve.load.bench_options import LoadOptions, RequestOptions

LOAD = LoadOptions()
REQUESTS = RequestOptions()


def bench(
    url: Annotated[
        tuple[str, ...],
        Parameter(
            help="URL of a server with OpenAI's API, such as `http://127.0.0.1:8000`. Several servers are "
            "measured in turns and compared with the first.",
            negative=(),
        ),
    ],
    *,
    load: LoadOptions = LOAD,
    requests: RequestOptions = REQUESTS,
    json: Annotated[
        Path | None, help_("File to write the results to, with the latency of each request.", default="none")
    ] = None,
) -> int:
    """Measure how fast servers respond: latencies, throughput and errors.

    The exit status is 0, or 3 if some requests failed, 1 if all failed or none could be sent, 130 after Ctrl-C, which
    prints the results so far.
    """
    from trio_pool_serve.load.run_bench import run_bench  # imported here: for --help it is not needed

    try:
        return trio.run(partial(run_bench, url, load, requests, json))
    except KeyboardInterrupt:  # before anything was sent
        return 128 + signal.SIGINT
