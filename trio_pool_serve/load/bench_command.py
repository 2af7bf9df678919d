"""``trio-pool-serve bench``: sends requests to servers and says how fast they answer."""

import signal
from functools import partial
from typing import Annotated

import trio
from cyclopts import Parameter

from trio_pool_serve.load.bench_options import LoadOptions, RequestOptions, ResultOptions

LOAD = LoadOptions()
REQUESTS = RequestOptions()
RESULTS = ResultOptions()


def bench(
    url: Annotated[
        tuple[str, ...],
        Parameter(
            help="Server, such as `http://127.0.0.1:8000`: this one or another with OpenAI's API. Several are measured "
            "in turns, and compared with the first.",
            negative=(),
        ),
    ],
    *,
    load: LoadOptions = LOAD,
    requests: RequestOptions = REQUESTS,
    results: ResultOptions = RESULTS,
) -> int:
    """Measure how fast servers answer: latencies, throughput and errors.

    The exit status is 0, or 3 if requests failed, 1 if all of them did or none could be sent, and 130 after Ctrl-C,
    which shows the results so far.
    """
    from trio_pool_serve.load.run_bench import run_bench  # imported here: for --help it is not needed

    try:
        return trio.run(partial(run_bench, url, load, requests, results))
    except KeyboardInterrupt:  # before anything was sent
        return 128 + signal.SIGINT
