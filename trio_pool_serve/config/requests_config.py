"""Settings of requests: how long they may take, inputs other than text, files of requests, and logs."""

import re
from ipaddress import IPv4Network, IPv6Network, ip_network
from pathlib import Path
from typing import Annotated, Literal, TypeAlias, get_args

from attrs import field, frozen
from attrs.validators import ge, gt, in_

from trio_pool_serve.config.setting import Setting, entries_of

LogLevel: TypeAlias = Literal["debug", "info", "warning", "error"]
LogFormat: TypeAlias = Literal["auto", "text", "json"]

HOST = re.compile(r"[\w.*-]+", re.ASCII)
"""A host name, or ``*.`` and a name, which stands for its subdomains."""


@frozen(kw_only=True)
class TimeLimitsConfig:
    """How long requests and their parts may take."""

    request_timeout_s: Annotated[
        float,
        Setting("Maximum duration of a request. The request header `X-Request-Timeout` can shorten it."),
    ] = field(default=600.0, validator=gt(0))
    client_timeout_s: Annotated[
        float,
        Setting(
            "Maximum time for a client to send or receive. It applies separately to the headers of a request, to its "
            "body, and to each 256 KiB of its response."
        ),
    ] = field(default=60.0, validator=gt(0))
    drain_timeout_s: Annotated[
        float,
        Setting("Time for running requests to finish after SIGTERM. Then they are aborted."),
    ] = field(default=30.0, validator=gt(0))


@frozen(kw_only=True)
class InputConfig:
    """Inputs other than text, and where they may come from."""

    trust_request_chat_template: Annotated[
        bool,
        Setting(
            "Accept chat templates in requests. They are rendered in a separate process with limits on time and memory."
        ),
    ] = False
    enable_prompt_embeds: Annotated[
        bool, Setting("Accept token embeddings in place of texts, in the field `prompt_embeds`.")
    ] = False
    allowed_media_path: Annotated[
        Path | None,
        Setting(
            "Directory from which requests may load images by `file:` URLs. Symbolic links that lead out of it are not "
            "followed.",
            default="none",
        ),
    ] = None
    allowed_media_domains: Annotated[
        str,
        Setting(
            "Hosts and networks from which images may be fetched, separated by commas, such as `cdn.example.org`, "
            "`*.example.org` (its subdomains), `*` (any host), `10.0.0.0/8` or `192.168.1.5`. A URL's host must be "
            "listed by name, or be an address in a listed network. All addresses of a host must be on the public "
            "internet or in a listed network.",
            default="any host on the public internet",
        ),
    ] = ""

    def __attrs_post_init__(self) -> None:
        self.media_entries  # noqa: B018  (raises)

    @property
    def media_entries(self) -> dict[str, IPv4Network | IPv6Network | None]:
        """The entries of ``allowed_media_domains`` in lower case, with the networks of addresses and networks.

        Raises ``ValueError``.
        """
        return {entry: _network_of(entry) for entry in entries_of(self.allowed_media_domains.lower())}


def _network_of(entry: str) -> IPv4Network | IPv6Network | None:
    """Return the network, or that of one address; ``None`` for a host name. Raises ``ValueError`` for neither."""
    try:
        return ip_network(entry)
    except ValueError as error:
        if HOST.fullmatch(entry):
            return None
        raise ValueError(f"--allowed-media-domains: `{entry}` is neither a host nor a network: {error}.") from error


@frozen(kw_only=True)
class BatchConfig:
    """The Batch API: files of requests, and where they and their results are stored."""

    data_dir: Annotated[
        str | None,
        Setting(
            "Directory for uploaded files, batches and their results. Each server needs its own; the first upload "
            "creates it. If it is empty, `/v1/files` and `/v1/batches` are not served.",
            default="`trio_pool_serve/port-PORT` in `$XDG_STATE_HOME` or `~/.local/state`",
        ),
    ] = None
    file_retention_days: Annotated[
        float,
        Setting("Days after which uploaded files, and finished batches with their results, are deleted; 0 keeps them."),
    ] = field(default=30.0, validator=ge(0))
    max_stored_bytes: Annotated[
        int, Setting("Maximum size of all files of one API key, including results; 0 is no limit.")
    ] = field(default=20 * 2**30, validator=ge(0))

    @property
    def is_served(self) -> bool:
        """Whether the Files and Batch API is served."""
        return self.data_dir != ""


@frozen(kw_only=True)
class LoggingConfig:
    """Logs on standard error."""

    log_level: Annotated[
        LogLevel,
        Setting(
            "Minimum severity of log messages. debug also logs the messages of unexpected errors, which may quote "
            "what clients send."
        ),
    ] = field(default="info", validator=in_(get_args(LogLevel)))
    log_format: Annotated[
        LogFormat,
        Setting("Log format; auto is text on a terminal, else json. json writes one object per line."),
    ] = field(default="auto", validator=in_(get_args(LogFormat)))
    access_log: Annotated[
        bool,
        Setting(
            "Log every request except probes and `/metrics`. Requests that fail with status 500 or above are always "
            "logged."
        ),
    ] = False
