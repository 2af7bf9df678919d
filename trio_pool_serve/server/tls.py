"""TLS: handshakes in turns, with a certificate and authorities that can be replaced while the server runs."""

import logging
import os
import ssl
from contextlib import suppress
from functools import partial
from typing import Self

import trio
from attrs import define, field

from trio_pool_serve.config import NetworkConfig
from trio_pool_serve.config.network_config import KEY_PASSWORD
from trio_pool_serve.server.client_socket import end_sending
from trio_pool_serve.service import Service
from trio_pool_serve.threads.client_turns import ClientTurns
from trio_pool_serve.threads.offload import Offload

logger = logging.getLogger(__name__)

PROTOCOLS = ["h2", "http/1.1"]

HINT = f"--ssl-keyfile and --ssl-ca-certs name further files, and {KEY_PASSWORD} has the password of an encrypted key."

HANDSHAKES = 32
"""Handshakes that begin at the same time. Each takes 0.6 ms of the event loop (RSA, 2,048 bits), so 20 ms for all."""

HANDSHAKES_PER_ADDRESS = 8

TURN_S = 0.02
"""Seconds after which another handshake begins, even if the client has not answered: its own continues without a turn.

With turns of 1 s, 250 addresses that never answered made others wait 4 s."""

RETRY_S = 1.0
"""Pause before certificate and key are read again if they do not match: perhaps only one was replaced so far."""


@define(eq=False)
class Certificates:
    """The certificate files of the settings, and the context with which connections begin TLS: addresses take turns."""

    network: NetworkConfig
    context: ssl.SSLContext
    offload: Offload
    _turns: ClientTurns = field(init=False, factory=partial(ClientTurns, HANDSHAKES, HANDSHAKES_PER_ADDRESS))

    @classmethod
    def of(cls, network: NetworkConfig, offload: Offload) -> Self | None:
        """Return the certificates; ``None`` without any, or on a Unix socket. Raises ``OSError`` with a message."""
        if network.ssl_certfile is None or network.unix_socket is not None:
            return None
        try:
            return cls(network, _context_of(network), offload)
        except (OSError, ValueError) as error:
            raise OSError(f"--ssl-certfile {network.ssl_certfile}: {error}. {HINT}") from error

    async def reload(self) -> None:
        """Reload the files: connections that begin afterwards get the new certificate.

        If the files are invalid, this is logged, they are read once more, and the old ones stay. Cancellation: at once.
        """
        paths = filter(None, (self.network.ssl_certfile, self.network.ssl_keyfile, self.network.ssl_ca_certs))
        read = partial(self.offload.reload, "certificate", partial(_context_of, self.network), *paths)
        if (context := await read()) is None:
            await trio.sleep(RETRY_S)
            context = await read()
        self.context = context or self.context

    async def begin_tls(self, connection: trio.SocketStream, client: int) -> trio.SSLStream[trio.SocketStream] | None:
        """Return a connection's stream after its handshake; ``None`` if the handshake fails. Cancellation: at once.

        ``client`` is a number for the client's address.
        """
        await trio.lowlevel.wait_readable(connection.socket)  # a client that sends nothing needs no turn
        stream: trio.SSLStream[trio.SocketStream] | None = None
        async with trio.open_nursery() as nursery:
            await nursery.start(self._take_turn, client)
            stream = trio.SSLStream(connection, self.context, server_side=True, https_compatible=True)
            try:
                await stream.do_handshake()
            except Exception as error:  # ends nothing else, as in ``serve_connection``
                logger.debug("a TLS handshake failed", exc_info=error)
                with suppress(trio.BrokenResourceError):
                    # OpenSSL's alert describes the error to the client; trio leaves it in OpenSSL's buffer.
                    await connection.send_all(stream._outgoing.read())  # noqa: SLF001
                    await end_sending(connection.socket)
                stream = None
            nursery.cancel_scope.cancel(reason="the handshake has ended")
        return stream

    async def _take_turn(self, client: int, *, task_status: trio.TaskStatus[None]) -> None:
        async with self._turns.turn(client):
            task_status.started()
            await trio.sleep(TURN_S)


def open_tls(service: Service) -> Certificates | None:
    """Return the certificates for a service's connections, if it has any; ``service.reload`` reads them again."""
    certificates = Certificates.of(service.config.network, service.offload)
    if certificates is not None:
        service.reload_hooks.append(certificates.reload)
    return certificates


def _context_of(network: NetworkConfig) -> ssl.SSLContext:
    """Return a new context, with nothing of earlier files. Each file is read once, and they must match."""
    assert network.ssl_certfile is not None  # noqa: S101  (there is no context without)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(PROTOCOLS)
    context.options |= ssl.OP_NO_RENEGOTIATION  # a client could ask for one handshake after the other
    # Without a password, OpenSSL would ask for one at the terminal.
    context.load_cert_chain(network.ssl_certfile, network.ssl_keyfile, password=os.environ.get(KEY_PASSWORD, ""))
    if network.ssl_ca_certs is not None:
        context.load_verify_locations(network.ssl_ca_certs)
        context.verify_mode = ssl.CERT_REQUIRED
    return context
