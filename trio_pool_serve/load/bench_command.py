"""``trio-pool-serve bench`` and its options: sends requests to servers and shows how fast they respond."""

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


@Parameter(name="*", group=Group("Load", sort_key=0))
@frozen(kw_only=True)
class LoadOptions:
    """The number of requests and their timing."""

    clients: Annotated[
        int | None,
        help_(
            "Closed loop: number of clients. Each sends its next request when it has its response.",
            default=f"{CLIENTS}, without `--rate`",
        ),
    ] = field(default=None, validator=optional([gt(0), le(10_000)]))
    rate: Annotated[
        float | None,
        help_(
            "Open loop: requests per second, at random times (Poisson), whether or not earlier ones have been "
            "answered. Latencies count from the time at which a request was due.",
            default="none",
        ),
    ] = field(default=None, validator=optional([gt(0), le(100_000)]))
    duration: Annotated[float, help_("Duration of the measurement in seconds.")] = field(
        default=10.0, validator=[gt(0), le(86_400)]
    )

    def __attrs_post_init__(self) -> None:
        if self.clients is not None and self.rate is not None:
            raise ValueError("--clients and --rate exclude each other: a loop is closed or open.")


@Parameter(name="*", group=Group("Requests", sort_key=1))
@frozen(kw_only=True)
class RequestOptions:
    """The contents of a request."""

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
        default=None, repr=False, validator=optional(matches_re(r"[\x21-\x7e]*"))
    )  # no character that ends a header
    texts: Annotated[int, help_("Texts in a request; documents of a query to rerank.")] = field(
        default=1, validator=[gt(0), le(100_000)]
    )
    tokens: Annotated[int, help_("Approximate tokens of a text, which consists of common English words.")] = field(
        default=32, validator=[gt(0), le(1_000_000)]
    )
    body_file: Annotated[Path | None, help_("File with one request body per line, sent unchanged.", default="none")] = (
        None
    )


LOAD = LoadOptions()
REQUESTS = RequestOptions()


def bench(
    url: Annotated[
        tuple[str, ...],
        Parameter(
            help="URL of a server with OpenAI's API, such as `http://127.0.0.1:8000`. Several servers are measured in "
            "turns, and compared with the first.",
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
    """Measure how fast servers respond: latencies, throughput and errors.

    The exit status is 0; 3 if some requests failed; 1 if all failed or none could be sent; 130 after Ctrl-C, which
    shows the results so far.
    """
    from trio_pool_serve.load.run_bench import run_bench  # imported here: for --help it is not needed

    try:
        return trio.run(partial(run_bench, url, load, requests, json))
    except KeyboardInterrupt:  # before anything was sent
        return 128 + signal.SIGINT
