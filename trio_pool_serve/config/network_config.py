"""Settings of the network: addresses, keys, limits of requests."""

import os
from ipaddress import IPv4Network, IPv6Network, ip_network
from pathlib import Path
from typing import Annotated, Literal, TypeAlias, get_args

from attrs import field, frozen
from attrs.validators import ge, gt, in_, le, min_len, optional
from cyclopts import Group, Parameter

from trio_pool_serve.config.help import help_, switch

UNIX = "unix"
"""Before the path of a Unix socket to listen on; among the trusted proxies: all that connect by it."""

MAX_SOCKET_PATH = 107
"""Bytes that fit into the address of a Unix socket on Linux."""

KeyScope: TypeAlias = Literal["all", "all-but-metrics", "vllm"]


@Parameter(name="*", group=Group("Network", sort_key=2))
@frozen(kw_only=True)
class NetworkConfig:
    """Where the server listens, and which requests it accepts."""

    host: Annotated[
        str,
        help_("Host name or IP address to listen on. `unix:PATH`: a Unix domain socket; `--port` is ignored then."),
    ] = "127.0.0.1"
    port: Annotated[int, help_("TCP port to listen on. 0 selects a free port.")] = field(
        default=8000, validator=[ge(0), le(65535)]
    )
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
    trusted_proxies: Annotated[
        str,
        help_(
            "Comma-separated addresses and networks of proxies; `unix`: clients of a Unix socket. Their header "
            "`X-Forwarded-For` tells clients without API keys apart. From other addresses it is ignored.",
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
    ssl_certfile: Annotated[
        Path | None,
        help_(
            "PEM file with the certificate, and those of its issuers: TCP clients are served by TLS.", default="none"
        ),
    ] = None
    ssl_keyfile: Annotated[
        Path | None,
        help_(
            "PEM file with the certificate's private key. By default it is in the file of the certificate. The "
            "environment variable `TRIO_POOL_SERVE_SSL_KEYFILE_PASSWORD` sets the password of an encrypted key."
        ),
    ] = None
    ssl_ca_certs: Annotated[
        Path | None,
        help_("PEM file with authorities: clients need a certificate of one of them.", default="none"),
    ] = None
    strict_requests: Annotated[
        bool, switch("Refuse requests with unknown fields, at the top level, instead of ignoring those.")
    ] = False
    max_inputs_per_request: Annotated[int, help_("Maximum number of inputs in one request.")] = field(
        default=2048, validator=gt(0)
    )

    def __attrs_post_init__(self) -> None:
        scheme, _, path = self.host.partition(":")
        if scheme == UNIX and not 0 < (n_bytes := len(os.fsencode(path))) <= MAX_SOCKET_PATH:
            raise ValueError(
                f"--host `{self.host}`: the path of a Unix socket has 1 to {MAX_SOCKET_PATH} bytes, not {n_bytes}."
            )
        if self.api_key is not None and not self.api_key_list:
            raise ValueError("--api-key has no key.")
        try:
            self.proxy_networks  # noqa: B018  (raises)
        except ValueError as error:
            raise ValueError(f"--trusted-proxies: {error}.") from error

    @property
    def unix_socket(self) -> Path | None:
        """The path of the Unix socket to listen on; ``None`` for TCP."""
        scheme, _, path = self.host.partition(":")
        return Path(path) if scheme == UNIX else None

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
