"""TLS of `trio-pool-serve serve`, and certificates that change while it runs."""

import contextlib
import signal
import socket
import ssl
from pathlib import Path

import httpx
import pytest
import trio
import trustme

from tests.lanes import sampled
from tests.server.server_process import SCRIPTED, ServerProcess, free_port, started
from trio_pool_serve.config import NetworkConfig
from trio_pool_serve.server.tls import Certificates
from trio_pool_serve.threads.offload import Offload

AUTHORITY = trustme.CA()
CLIENT = ssl.create_default_context()
AUTHORITY.configure_trust(CLIENT)


def write_certificate(folder: Path, name: str, password: bytes | None = None) -> tuple[Path, Path]:
    """Write a certificate for 127.0.0.1 that has a name in it by which it is told apart."""
    certificate = AUTHORITY.issue_cert("127.0.0.1", common_name=name)
    certfile, keyfile = folder / "cert.pem", folder / "key.pem"
    certfile.write_bytes(b"".join(blob.bytes() for blob in certificate.cert_chain_pems))
    keyfile.write_bytes(certificate.private_key_pem.bytes())
    if password is not None:
        keyfile.write_bytes(encrypted(keyfile.read_bytes(), password))
    return certfile, keyfile


def encrypted(key: bytes, password: bytes) -> bytes:
    from cryptography.hazmat.primitives import serialization

    private = serialization.load_pem_private_key(key, None)
    return private.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(password),
    )


async def name_of(server: ServerProcess) -> str:
    """Return the name in the certificate that a new connection gets."""
    async with await trio.open_ssl_over_tcp_stream("127.0.0.1", server.port, ssl_context=CLIENT) as stream:
        await stream.do_handshake()
        fields = dict(pair for pairs in stream.getpeercert()["subject"] for pair in pairs)
        return fields["commonName"]


@sampled("workers", [1, 2], keep=[1])
async def test_a_certificate_is_replaced_at_sighup_and_a_broken_one_is_not_used(tmp_path, scripted_folder, workers):
    certfile, keyfile = write_certificate(tmp_path, "first")
    port = free_port()
    placement = ["--engine", "process" if workers > 1 else "local", "--api-workers", str(workers)]
    files = ["--ssl-certfile", str(certfile), "--ssl-keyfile", str(keyfile)]
    command = [*SCRIPTED, str(scripted_folder), *placement, *files, "--port", str(port)]
    with started(command, port, tmp_path / "server.log", {}) as server:
        await server.wait_logged(f"https://127.0.0.1:{port}")
        async with httpx.AsyncClient(base_url=f"https://127.0.0.1:{port}", verify=CLIENT) as kept:
            assert (await kept.post("/v1/embeddings", json={"input": "hello"})).status_code == 200
            assert await name_of(server) == "first"
            write_certificate(tmp_path, "second")
            server.signal(signal.SIGHUP)
            await server.wait_logged("the certificate has been read again", workers)
            assert {await name_of(server) for _ in range(4)} == {"second"}
            certfile.write_text("no certificate")
            server.signal(signal.SIGHUP)
            await server.wait_logged("the certificate stays as it is", workers)
            assert await name_of(server) == "second"
            assert (await kept.post("/v1/embeddings", json={"input": "hello"})).status_code == 200
        server.signal()
        assert await server.wait_exit() == 0
        assert "Traceback" not in server.log


async def test_a_certificate_that_cannot_be_used_is_said_in_one_line(tmp_path, scripted_folder):
    command = [*SCRIPTED, str(scripted_folder), "--ssl-certfile", str(tmp_path / "none.pem")]
    with started(command, 0, tmp_path / "server.log", {}) as server:
        status, log = await server.wait_exit_and_log()
    assert status == 1
    assert "none.pem" in log
    assert "Traceback" not in log


async def handshake(certificates: Certificates, client: ssl.SSLContext) -> None:
    """Let a client connect; raises what it raises."""
    near, far = map(trio.socket.from_stdlib_socket, socket.socketpair())
    async with trio.SocketStream(near) as ours, trio.SocketStream(far) as theirs, trio.open_nursery() as nursery:
        server = trio.SSLStream(ours, certificates.context, server_side=True)

        async def accept() -> None:
            with contextlib.suppress(trio.BrokenResourceError):
                await server.do_handshake()
                await server.send_all(b"ok")
            await ours.aclose()

        nursery.start_soon(accept)
        stream = trio.SSLStream(theirs, client, server_hostname="127.0.0.1")
        try:
            assert await stream.receive_some() == b"ok"  # with TLS 1.3 a refused certificate is noticed only now
        except trio.BrokenResourceError:
            raise PermissionError from None


async def test_client_certificates_are_demanded_if_authorities_are_given(tmp_path):
    certfile, keyfile = write_certificate(tmp_path, "server")
    AUTHORITY.cert_pem.write_to_path(tmp_path / "ca.pem")
    network = NetworkConfig(ssl_certfile=certfile, ssl_keyfile=keyfile, ssl_ca_certs=tmp_path / "ca.pem")
    certificates = Certificates.of(network, Offload())
    assert certificates is not None
    with pytest.RaisesGroup(PermissionError):
        await handshake(certificates, CLIENT)
    known = ssl.create_default_context()
    AUTHORITY.configure_trust(known)
    AUTHORITY.issue_cert("client").configure_cert(known)
    await handshake(certificates, known)


async def test_a_key_may_have_a_password_and_without_it_nobody_is_asked(tmp_path):
    certfile, keyfile = write_certificate(tmp_path, "server", b"secret")
    network = NetworkConfig(ssl_certfile=certfile, ssl_keyfile=keyfile, ssl_keyfile_password="secret")
    certificates = Certificates.of(network, Offload())
    assert certificates is not None
    await handshake(certificates, CLIENT)
    assert "secret" not in repr(network)
    with pytest.raises(OSError, match="ssl-certfile"):
        Certificates.of(NetworkConfig(ssl_certfile=certfile, ssl_keyfile=keyfile), Offload())
