"""``trio-pool-serve bench`` and its options: sends requests to servers and says how fast they answer."""

import re
import signal
from functools import partial
from pathlib import Path
from typing import Annotated

import trio
from attrs import field, frozen
from attrs.validators import gt, le, matches_re, optional
from cyclopts import Group, Parameter

from trio_pool_serve.config.help import help_

CLIENTS = 32

HEADER_VALUE = re.compile(r"[\x21-\x7e]*")
"""What a key may consist of, so that it is no further header."""


@Parameter(name="*", group=Group("Load", sort_key=0))
@frozen(kw_only=True)
class LoadOptions:
    """How many requests are sent, and when."""

    clients: Annotated[
        int | None,
        help_(
            "Closed loop: so many clients, of which each sends its next request when it has its response.",
            default=f"{CLIENTS}, without `--rate`",
        ),
    ] = field(default=None, validator=optional([gt(0), le(10_000)]))
    rate: Annotated[
        float | None,
        help_(
            "Open loop: so many requests a second, at random times (Poisson), whether or not earlier ones have been "
            "answered. Latencies count from the time at which a request was to begin.",
            default="none",
        ),
    ] = field(default=None, validator=optional([gt(0), le(100_000)]))
    duration: Annotated[float, help_("Seconds for which requests are measured.")] = field(
        default=10.0, validator=[gt(0), le(86_400)]
    )

    def __attrs_post_init__(self) -> None:
        if self.clients is not None and self.rate is not None:
            raise ValueError("--clients and --rate exclude each other: a loop is closed or open.")


@Parameter(name="*", group=Group("Requests", sort_key=1))
@frozen(kw_only=True)
class RequestOptions:
    """What a request has."""

    route: Annotated[
        str,
        help_(
            "/v1/embeddings, /v1/rerank, /v1/score, /pooling, /classify or /embed, also with or without /v1; with "
            "`--body-file` any route."
        ),
    ] = field(default="/v1/embeddings", validator=matches_re(r"/[\x21-\x7e]*"))
    model: Annotated[
        str | None, help_("Name of the model in requests.", default="the first that the server's `/v1/models` lists")
    ] = None
    api_key: Annotated[str | None, help_("API key of the server.", default="`OPENAI_API_KEY`")] = field(
        default=None, repr=False, validator=optional(matches_re(HEADER_VALUE))
    )
    texts: Annotated[int, help_("Texts in a request; documents of a query to rerank.")] = field(
        default=1, validator=[gt(0), le(100_000)]
    )
    tokens: Annotated[int, help_("About how many tokens a text has: it consists of so many common English words.")] = (
        field(default=32, validator=[gt(0), le(1_000_000)])
    )
    body_file: Annotated[
        Path | None, help_("File with the body of a request in each line, which is sent as it is.", default="none")
    ] = None


LOAD = LoadOptions()
REQUESTS = RequestOptions()


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
    json: Annotated[
        Path | None, help_("File for the results, with the latency of each request.", default="none")
    ] = None,
) -> int:
    """Measure how fast servers answer: latencies, throughput and errors.

    The exit status is 0, or 3 if requests failed, 1 if all of them did or none could be sent, and 130 after Ctrl-C,
    which shows the results so far.
    """
    from trio_pool_serve.load.run_bench import run_bench  # imported here: for --help it is not needed

    try:
        return trio.run(partial(run_bench, url, load, requests, json))
    except KeyboardInterrupt:  # before anything was sent
        return 128 + signal.SIGINT
