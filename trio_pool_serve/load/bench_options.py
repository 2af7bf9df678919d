"""The options of ``trio-pool-serve bench``."""

import re
from pathlib import Path
from typing import Annotated, Literal, TypeAlias, get_args

from attrs import field, frozen
from attrs.validators import ge, gt, in_, le, matches_re, optional
from cyclopts import Group, Parameter

from trio_pool_serve.config.help import help_

EncodingFormat: TypeAlias = Literal["float", "base64"]

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
    warmup: Annotated[float, help_("Seconds before that, in which requests are sent and not counted.")] = field(
        default=1.0, validator=[ge(0), le(3600)]
    )
    rounds: Annotated[
        int | None,
        help_("How often the duration is repeated, with several servers in turns.", default="1, with several URLs 3"),
    ] = field(default=None, validator=optional([gt(0), le(1000)]))
    timeout: Annotated[float, help_("Seconds after which a request that has no response counts as failed.")] = field(
        default=60.0, validator=gt(0)
    )
    seed: Annotated[int, help_("Of random texts and times.")] = 0

    def __attrs_post_init__(self) -> None:
        if self.clients is not None and self.rate is not None:
            raise ValueError("--clients and --rate exclude each other: a loop is closed or open.")

    @property
    def closed_loop_clients(self) -> int:
        """Number of clients; 0: an open loop."""
        return 0 if self.rate is not None else self.clients or CLIENTS


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
    texts_file: Annotated[
        Path | None, help_("File with a text in each line, in place of random ones.", default="none")
    ] = None
    body_file: Annotated[
        Path | None, help_("File with the body of a request in each line, which is sent as it is.", default="none")
    ] = None
    encoding_format: Annotated[
        EncodingFormat | None, help_("`encoding_format` of embeddings: float or base64.", default="the server's")
    ] = field(default=None, validator=optional(in_(get_args(EncodingFormat))))


@Parameter(name="*", group=Group("Results", sort_key=2))
@frozen(kw_only=True)
class ResultOptions:
    """Where results are written besides the terminal."""

    png: Annotated[Path | None, help_("File for a plot of the latencies. Needs the extra `bench`.", default="none")] = (
        None
    )
    json: Annotated[Path | None, help_("File for the results, with the latency of each request.", default="none")] = (
        None
    )
