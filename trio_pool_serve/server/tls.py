"""TLS: the server's certificate, which can be replaced while the server runs."""

import logging
import ssl
from functools import partial
from typing import Self

from attrs import define

from trio_pool_serve.config import NetworkConfig
from trio_pool_serve.service import Service
from trio_pool_serve.threads.offload import Offload

logger = logging.getLogger(__name__)

PROTOCOLS = ["h2", "http/1.1"]


@define(eq=False)
class Certificates:
    """The certificate files of the settings, and the context with which connections begin TLS."""

    network: NetworkConfig
    context: ssl.SSLContext
    offload: Offload

    @classmethod
    def of(cls, network: NetworkConfig, offload: Offload) -> Self | None:
        """Return them, ``None`` without a certificate or on a Unix socket. Raises ``OSError`` with a message."""
        if network.ssl_certfile is None or network.uds is not None:
            return None
        try:
            return cls(network, _context_of(network), offload)
        except (OSError, ValueError) as error:
            raise OSError(f"--ssl-certfile {network.ssl_certfile}: {error}") from error

    async def reload(self) -> None:
        """Read the files again: connections that begin from now on get the new certificate.

        Files that cannot be used are logged, and nothing is changed. Cancellation: once they have been read.
        """
        try:
            await self.offload.run("load", partial(_context_of, self.network))  # whether they can be used
        except (OSError, ValueError) as error:
            logger.warning("the certificate stays as it is: %s: %s", self.network.ssl_certfile, error)
            return
        _load(self.context, self.network)
        logger.info("the certificate has been read again: %s", self.network.ssl_certfile)


def open_tls(service: Service) -> ssl.SSLContext | None:
    """Return the context for a service's connections, if it has a certificate; ``service.reload`` reads that again."""
    certificates = Certificates.of(service.config.network, service.offload)
    if certificates is None:
        return None
    service.reload_hooks.append(certificates.reload)
    return certificates.context


def _context_of(network: NetworkConfig) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(PROTOCOLS)
    _load(context, network)
    return context


def _load(context: ssl.SSLContext, network: NetworkConfig) -> None:
    assert network.ssl_certfile is not None  # noqa: S101  (there is no context without)
    # Without a password, OpenSSL would ask for one at the terminal.
    context.load_cert_chain(network.ssl_certfile, network.ssl_keyfile, password=network.ssl_keyfile_password or "")
    if network.ssl_ca_certs is not None:
        context.load_verify_locations(network.ssl_ca_certs)
        context.verify_mode = ssl.VerifyMode(network.ssl_cert_reqs)
