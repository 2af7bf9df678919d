"""The options of ``trio-pool-serve bench``: the number of requests, and their contents."""

import re
from pathlib import Path
from typing import Annotated

from attrs import field, frozen
from attrs.validators import gt, le, optional
from cyclopts import Group, Parameter

from trio_pool_serve.config.help import help_
from trio_pool_serve.config.setting import matches, within
from trio_pool_serve.errors import require

CLIENTS = 32


def _check_key(_: object, __: object, key: str) -> None:
    require(
        re.fullmatch(r"[\x21-\x7e]*", key) is not None,
        "--api-key contains a character that is not printable ASCII.",
        ValueError,
    )


@Parameter(name="*", group=Group("Load", sort_key=0))
@frozen(kw_only=True)
class LoadOptions:
    """The number of requests and their timing."""

    clients: Annotated[
        int | None,
        help_(
            "Closed loop: number of clients. Each sends its next request when it has received the response.",
            default=f"{CLIENTS}, without `--rate`",
        ),
    ] = field(default=None, validator=optional(within(1, 10_000)))
    rate: Annotated[
        float | None,
        help_(
            "Open loop: requests per second, at random times (Poisson), whether or not earlier requests have ended. "
            "Latencies count from the time at which a request was due.",
            default="none",
        ),
    ] = field(default=None, validator=optional([gt(0), le(100_000)]))
    duration: Annotated[float, help_("Duration of the measurement in seconds.")] = field(
        default=10.0, validator=[gt(0), le(86_400)]
    )

    def __attrs_post_init__(self) -> None:
        require(
            self.clients is None or self.rate is None,
            "Set either --clients for a closed loop or --rate for an open loop, not both.",
            ValueError,
        )


@Parameter(name="*", group=Group("Requests", sort_key=1))
@frozen(kw_only=True)
class RequestOptions:
    """The contents of a request."""

    route: Annotated[
        str,
        help_(
            "Route to send requests to: /v1/embeddings, /v1/rerank, /v1/score, /pooling, /classify or /embed, each "
            "with or without /v1; with `--body-file`, any route."
        ),
    ] = field(default="/v1/embeddings", validator=matches(r"/[\x21-\x7e]*", "a route, such as /v1/embeddings"))
    model: Annotated[
        str | None, help_("Name of the model in requests.", default="the first that the server's `/v1/models` lists")
    ] = None
    api_key: Annotated[str | None, help_("API key of the server.", default="`OPENAI_API_KEY`")] = field(
        default=None, repr=False, validator=optional(_check_key)
    )
    texts: Annotated[int, help_("Texts per request, or documents per query to rerank.")] = field(
        default=1, validator=within(1, 100_000)
    )
    tokens: Annotated[int, help_("Approximate tokens per text; texts consist of common English words.")] = field(
        default=32, validator=within(1, 1_000_000)
    )
    body_file: Annotated[Path | None, help_("File with one request body per line, sent unchanged.", default="none")] = (
        None
    )
