"""Settings of the network: addresses, keys, limits of requests."""

import os
from ipaddress import IPv4Network, IPv6Network, ip_network
from pathlib import Path
from typing import Annotated, Literal, TypeAlias, get_args

from attrs import field, frozen
from attrs.validators import gt, in_

from trio_pool_serve.config.setting import Setting, entries_of, matches, within
from trio_pool_serve.errors import require

UNIX = "unix"
"""Prefix of the path of a Unix socket to listen on; in the trusted proxies: all clients of that socket."""

MAX_SOCKET_PATH = 107
"""Bytes that fit into the address of a Unix socket on Linux."""

KEY_PASSWORD = "TRIO_POOL_SERVE_SSL_KEYFILE_PASSWORD"  # noqa: S105  (a name)
"""The variable with the password of the private key. Other users of the machine could see a flag."""

KeyScope: TypeAlias = Literal["all", "all-but-metrics", "all-but-models", "vllm"]


@frozen(kw_only=True)
class NetworkConfig:
    """Where the server listens, and which requests it accepts."""

    host: Annotated[
        str,
        Setting("Host name or IP address to listen on, or unix:PATH. With a Unix socket, `--port` has no effect."),
    ] = field(default="127.0.0.1", validator=matches(r"(?s).+", "a host name, an IP address or unix:PATH"))
    port: Annotated[int, Setting("Port to listen on; 0 selects a free one.")] = field(
        default=8000, validator=within(0, 65535)
    )
    api_key: Annotated[
        str | None,
        Setting(
            "API keys of clients, separated by commas. Clients send a key as `Authorization: Bearer KEY`, or in the "
            "header `X-Api-Key` or `api-key`.",
            default="none",
        ),
    ] = field(default=None, repr=False)
    api_keys_file: Annotated[
        Path | None,
        Setting(
            "TOML file with API keys, their models and limits. Each table contains a key or its SHA-256. Send SIGHUP "
            "to reload the file. See docs/keys-and-tls.md.",
            default="none",
        ),
    ] = None
    trusted_proxies: Annotated[
        str,
        Setting(
            "Addresses and networks of trusted proxies, separated by commas; `unix` trusts all clients of the Unix "
            "socket. The header `X-Forwarded-For` of these proxies distinguishes clients without API keys. From other "
            "addresses, the header is ignored.",
            default="none",
        ),
    ] = ""
    api_key_scope: Annotated[
        KeyScope,
        Setting(
            "Routes that require a key. all: all except probes. all-but-metrics: all except probes and `/metrics`. "
            "all-but-models: all except probes and the list of models, which some clients request without a key. "
            "vllm: paths that begin with `/v1` or `/v2`, as in vLLM, and routes that change the server."
        ),
    ] = field(default="all", validator=in_(get_args(KeyScope)))
    cors_allow_origins: Annotated[
        str,
        Setting(
            "Origins whose pages may send requests; * allows all. Separate several, such as `https://a.org`, by "
            "commas.",
            default="none",
        ),
    ] = ""
    max_body_bytes: Annotated[int, Setting("Maximum size of a request body.")] = field(
        default=16 * 2**20, validator=gt(0)
    )
    ssl_certfile: Annotated[
        Path | None,
        Setting(
            "PEM file with the certificate; enables TLS. Append the certificates of its issuers.",
            default="none",
        ),
    ] = None
    ssl_keyfile: Annotated[
        Path | None,
        Setting(
            "PEM file with the private key. The environment variable `TRIO_POOL_SERVE_SSL_KEYFILE_PASSWORD` sets the "
            "password of an encrypted key.",
            default="the file of the certificate",
        ),
    ] = None
    ssl_ca_certs: Annotated[
        Path | None,
        Setting(
            "PEM file with certificate authorities. Clients must present a certificate of one of them.", default="none"
        ),
    ] = None
    strict_requests: Annotated[
        bool, Setting("Refuse requests with unknown fields at the top level instead of ignoring these fields.")
    ] = False
    max_inputs_per_request: Annotated[int, Setting("Maximum number of inputs in a request.")] = field(
        default=2048, validator=gt(0)
    )

    def __attrs_post_init__(self) -> None:
        scheme, _, path = self.host.partition(":")
        if scheme == UNIX and not 0 < (n_bytes := len(os.fsencode(path))) <= MAX_SOCKET_PATH:
            raise ValueError(
                f"--host `{self.host}`: the path of a Unix socket has 1 to {MAX_SOCKET_PATH} bytes, not {n_bytes}."
            )
        require(
            self.ssl_certfile is not None or not (self.ssl_keyfile or self.ssl_ca_certs),
            "--ssl-keyfile and --ssl-ca-certs require --ssl-certfile, which enables TLS.",
            ValueError,
        )
        require(
            self.api_key is None or bool(self.api_key_list),
            "--api-key is empty: give a key, or leave out the flag.",
            ValueError,
        )
        try:
            self.proxy_networks  # noqa: B018  (raises)
        except ValueError as error:
            raise ValueError(f"--trusted-proxies: {error}; accepted: addresses, networks and unix.") from error

    @property
    def unix_socket(self) -> Path | None:
        """The path of the Unix socket to listen on; ``None`` for TCP."""
        scheme, _, path = self.host.partition(":")
        return Path(path) if scheme == UNIX else None

    @property
    def api_key_list(self) -> tuple[str, ...]:
        """The keys of ``api_key``."""
        return tuple(entries_of(self.api_key or ""))

    @property
    def proxy_networks(self) -> tuple[IPv4Network | IPv6Network, ...]:
        """The networks of ``trusted_proxies``. Raises ``ValueError``."""
        return tuple(ip_network(entry) for entry in entries_of(self.trusted_proxies) if entry != UNIX)

    @property
    def trusts_unix(self) -> bool:
        """Whether clients of a Unix socket are among ``trusted_proxies``."""
        return UNIX in entries_of(self.trusted_proxies)
