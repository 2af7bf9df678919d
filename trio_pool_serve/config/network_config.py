"""Settings of the network: addresses, keys, limits of requests."""

import re
from ipaddress import IPv4Network, IPv6Network, ip_network
from pathlib import Path
from typing import Annotated, Literal, TypeAlias, get_args

from attrs import field, frozen
from attrs.validators import ge, gt, in_, le, matches_re, min_len, optional
from cyclopts import Group, Parameter

from trio_pool_serve.config.help import help_, switch

UNIX = "unix"
"""Among the trusted proxies: all that connect by the Unix socket."""

KeyScope: TypeAlias = Literal["all", "all-but-metrics", "vllm"]


@Parameter(name="*", group=Group("Network", sort_key=2))
@frozen(kw_only=True)
class NetworkConfig:
    """Where the server listens, and which requests it accepts."""

    host: Annotated[str, help_("Host name or IP address to listen on.")] = "127.0.0.1"
    port: Annotated[int, help_("TCP port to listen on. 0 selects a free port.")] = field(
        default=8000, validator=[ge(0), le(65535)]
    )
    uds: Annotated[
        Path | None,
        help_("Path of a Unix domain socket to listen on. If set, host and port are ignored.", default="none"),
    ] = None
    api_key: Annotated[
        str | None,
        help_(
            "Key that requests must present in the header `Authorization: Bearer KEY`, `X-Api-Key` or `api-key`; or "
            "several, separated by commas.",
            default="none",
        ),
    ] = field(default=None, repr=False, validator=optional(min_len(1)))
    api_keys_file: Annotated[
        Path | None,
        help_(
            "TOML file with a table for each API key: the key or its SHA-256, the models it may use, and its limits. "
            "SIGHUP has it read again. See docs/operations.md.",
            default="none",
        ),
    ] = None
    client_header: Annotated[
        str | None,
        help_(
            "Header by which clients without API keys are told apart, such as `X-Forwarded-For`. Believed only in "
            "requests from `--trusted-proxies`, otherwise ignored.",
            default="none",
        ),
    ] = field(default=None, validator=optional(matches_re(r"[A-Za-z0-9-]+", re.ASCII)))
    trusted_proxies: Annotated[
        str,
        help_(
            "Comma-separated addresses and networks of proxies whose `--client-header` is believed; `unix`: clients of "
            "`--uds`.",
            default="none",
        ),
    ] = ""
    api_key_scope: Annotated[
        KeyScope,
        help_(
            "Which routes require the key. all: every one but probes. all-but-metrics: `/metrics` is open too. vllm: "
            "only paths that begin with `/v1` or `/v2`, as in vLLM."
        ),
    ] = field(default="all", validator=in_(get_args(KeyScope)))
    accept_any_model: Annotated[
        bool, switch("Serve requests that name an unknown model by the first model instead of refusing them.")
    ] = False
    cors_allow_origins: Annotated[
        str,
        help_(
            "Comma-separated origins whose web pages may send requests, such as `https://example.org`; `*` allows all.",
            default="none",
        ),
    ] = ""
    max_body_bytes: Annotated[int, help_("Maximum size of a request body in bytes.")] = field(
        default=16 * 2**20, validator=gt(0)
    )
    write_timeout_s: Annotated[
        float,
        help_(
            "Seconds in which a client must read 256 KiB of its response, or the rest of it. After that it is "
            "disconnected; with HTTP/2 only the stream ends."
        ),
    ] = field(default=60.0, validator=gt(0))
    max_connections: Annotated[
        int,
        help_(
            "Maximum number of open connections of an API process. Further ones get a 503 response, and are closed. "
            "Fewer if the process may open few files."
        ),
    ] = field(default=4096, validator=gt(0))
    max_connections_per_address: Annotated[
        int,
        help_(
            "Maximum number of open connections of an API process to one client address; 0 for any number. Behind a "
            "proxy all connections have the proxy's address."
        ),
    ] = field(default=0, validator=ge(0))
    ssl_certfile: Annotated[
        Path | None,
        help_(
            "PEM file with the certificate, and those of its issuers: TCP clients are served by TLS.", default="none"
        ),
    ] = None
    ssl_keyfile: Annotated[
        Path | None,
        help_("PEM file with the certificate's private key. By default it is in the file of the certificate."),
    ] = None
    ssl_keyfile_password: Annotated[str | None, help_("Password of the private key.", default="none")] = field(
        default=None, repr=False
    )
    ssl_ca_certs: Annotated[
        Path | None,
        help_("PEM file with the authorities whose client certificates are accepted.", default="none"),
    ] = None
    ssl_cert_reqs: Annotated[
        int,
        help_(
            "Whether clients need a certificate, with `--ssl-ca-certs`: 0 no, 1 they may present one, 2 yes. The "
            "numbers are those of Python's `ssl` module."
        ),
    ] = field(default=2, validator=in_((0, 1, 2)))
    console: Annotated[
        bool,
        help_("Serve `/console`, a page that shows the load and what the models make of texts. See docs/console.md."),
    ] = True
    strict_requests: Annotated[
        bool, switch("Refuse requests with unknown fields, at the top level, instead of ignoring those.")
    ] = False
    auto_truncate: Annotated[
        bool, help_("Truncate inputs that are too long in TEI requests that do not set `truncate`.")
    ] = True
    truncate_by_default: Annotated[
        bool,
        switch(
            "Truncate inputs that are too long in all requests that do not say otherwise, instead of refusing them."
        ),
    ] = False
    max_inputs_per_request: Annotated[int, help_("Maximum number of inputs in one request.")] = field(
        default=2048, validator=gt(0)
    )

    def __attrs_post_init__(self) -> None:
        if self.api_key is not None and not self.api_key_list:
            raise ValueError("--api-key has no key.")
        try:
            self.proxy_networks  # noqa: B018  (raises)
        except ValueError as error:
            raise ValueError(f"--trusted-proxies: {error}.") from error

    @property
    def api_key_list(self) -> tuple[str, ...]:
        """The keys of ``api_key``."""
        keys = (key.strip() for key in (self.api_key or "").split(","))
        return tuple(key for key in keys if key)

    @property
    def proxy_networks(self) -> tuple[IPv4Network | IPv6Network, ...]:
        """The networks of ``trusted_proxies``. Raises ``ValueError``."""
        return tuple(ip_network(part) for part in self._proxies if part != UNIX)

    @property
    def trusts_unix(self) -> bool:
        """Whether clients of a Unix socket are among ``trusted_proxies``."""
        return UNIX in self._proxies

    @property
    def _proxies(self) -> list[str]:
        return [part for part in (part.strip() for part in self.trusted_proxies.split(",")) if part]
