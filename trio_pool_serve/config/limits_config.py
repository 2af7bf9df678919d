"""Settings that limit the duration of requests, and their inputs other than text."""

import re
from ipaddress import IPv4Network, IPv6Network, ip_network
from pathlib import Path
from typing import Annotated

from attrs import field, frozen
from attrs.validators import gt

from trio_pool_serve.config.setting import Setting, switch

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
            "Time for a client to send headers or a body, or to read. It applies separately to the headers of a "
            "request, to its body, and to each 256 KiB of its response."
        ),
    ] = field(default=60.0, validator=gt(0))
    drain_timeout_s: Annotated[
        float,
        Setting("Time for running requests to finish after SIGTERM. After it, they are aborted."),
    ] = field(default=30.0, validator=gt(0))


@frozen(kw_only=True)
class InputConfig:
    """Inputs other than text, and where they may come from."""

    trust_request_chat_template: Annotated[
        bool,
        switch(
            "Accept chat templates in requests. They are rendered in a separate process with limits on time and memory."
        ),
    ] = False
    enable_prompt_embeds: Annotated[
        bool, switch("Accept token embeddings in place of texts, in the field `prompt_embeds`.")
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
        self.media_networks  # noqa: B018  (raises)

    @property
    def media_domains(self) -> frozenset[str]:
        """All entries of ``allowed_media_domains``, in lower case: with networks alone, no host name is allowed."""
        return frozenset(self._media_entries)

    @property
    def media_networks(self) -> tuple[IPv4Network | IPv6Network, ...]:
        """The networks and addresses of ``allowed_media_domains``. Raises ``ValueError``."""
        return tuple(network for network in self._media_entries.values() if network is not None)

    @property
    def _media_entries(self) -> dict[str, IPv4Network | IPv6Network | None]:
        entries = (entry.strip().lower() for entry in self.allowed_media_domains.split(","))
        return {entry: _network_of(entry) for entry in entries if entry}


def _network_of(entry: str) -> IPv4Network | IPv6Network | None:
    """Return the network, or that of one address; ``None`` for a host name. Raises ``ValueError`` for neither."""
    try:
        return ip_network(entry)
    except ValueError as error:
        if HOST.fullmatch(entry):
            return None
        raise ValueError(f"--allowed-media-domains: {entry} is neither a host nor a network: {error}.") from error
