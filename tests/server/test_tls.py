"""TLS of `trio-pool-serve serve`, and certificates that change while it runs."""

import contextlib
import os
import select
import shutil
import signal
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import h2.config
import h2.connection
import httpx
import pytest
import trio
import trustme

from tests.lanes import sampled
from tests.server.served_app import app, connect, served_app
from tests.server.server_process import SCRIPTED, ServerProcess, free_port, started, until
from trio_pool_serve.cli import read_config
from trio_pool_serve.config import NetworkConfig
from trio_pool_serve.server import tls
from trio_pool_serve.server.server_context import Connections
from trio_pool_serve.server.tls import Certificates
from trio_pool_serve.threads.offload import Offload

AUTHORITY = trustme.CA()
EXPIRED = datetime.now(UTC) - timedelta(days=1)


def write_certificate(folder: Path, name: str, password: bytes | None = None) -> tuple[Path, Path]:
    """Write a certificate for 127.0.0.1 that has a name in it by which it is told apart."""
    certificate = AUTHORITY.issue_cert("127.0.0.1", common_name=name)
    certfile, keyfile = folder / "cert.pem", folder / "key.pem"
    certfile.write_bytes(b"".join(blob.bytes() for blob in certificate.cert_chain_pems))
    keyfile.write_bytes(certificate.private_key_pem.bytes())
    if password is not None:
        keyfile.write_bytes(encrypted(keyfile.read_bytes(), password))
    return certfile, keyfile


def certificates_in(folder: Path, name: str = "server", **more: Path | None) -> Certificates:
    """Write a certificate to a folder, and return what a server makes of it."""
    certfile, keyfile = write_certificate(folder, name)
    certificates = Certificates.of(NetworkConfig(ssl_certfile=certfile, ssl_keyfile=keyfile, **more), Offload())
    assert certificates is not None
    return certificates


def trusting(authority: trustme.CA | None = None) -> ssl.SSLContext:
    """Return what a client trusts and presents: with an authority, a certificate of its."""
    client = ssl.create_default_context()
    AUTHORITY.configure_trust(client)
    if authority is not None:
        authority.issue_cert("client").configure_cert(client)
    return client


CLIENT = trusting()


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
            await server.wait_logged("reloaded the certificate", workers)
            assert {await name_of(server) for _ in range(4)} == {"second"}
            certfile.write_text("no certificate")
            server.signal(signal.SIGHUP)
            await server.wait_logged("reloading the certificate failed", workers)
            assert await name_of(server) == "second"
            assert (await kept.post("/v1/embeddings", json={"input": "hello"})).status_code == 200
            certfile.unlink()
            os.mkfifo(certfile)
            server.signal(signal.SIGHUP)
            await server.wait_logged("cert.pem is not a regular file", workers)
            certfile.unlink()
            write_certificate(tmp_path, "third")
            server.signal(signal.SIGHUP)
            await server.wait_logged("reloaded the certificate", 2 * workers)
            assert await name_of(server) == "third"
        await server.drain()
        assert "Traceback" not in server.log


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


async def test_a_key_may_have_a_password_and_without_it_nobody_is_asked(tmp_path, monkeypatch, caplog):
    certfile, keyfile = write_certificate(tmp_path, "server", b"secret")
    network = NetworkConfig(ssl_certfile=certfile, ssl_keyfile=keyfile)
    with pytest.raises(OSError, match="ssl-certfile"):
        Certificates.of(network, Offload())
    monkeypatch.setenv("TRIO_POOL_SERVE_SSL_KEYFILE_PASSWORD", "secret")
    assert read_config(["m", "--ssl-certfile", str(certfile), "--ssl-keyfile", str(keyfile)]).network == network
    certificates = Certificates.of(network, Offload())
    assert certificates is not None
    await handshake(certificates, CLIENT)
    write_certificate(tmp_path, "server", b"another")
    monkeypatch.setenv("TRIO_POOL_SERVE_SSL_KEYFILE_PASSWORD", "another")
    first = certificates.context
    await certificates.reload()
    assert certificates.context is not first
    assert "secret" not in repr(network) + caplog.text


async def is_accepted(certificates: Certificates, client: ssl.SSLContext) -> bool:
    """Whether a client can connect, with a session of its own."""
    is_accepted = True
    try:
        await handshake(certificates, client)
    except* PermissionError:
        is_accepted = False
    return is_accepted


async def test_an_authority_that_is_taken_out_of_the_file_is_not_trusted_after_a_reload(
    tmp_path,
):
    removed, kept = trustme.CA(), trustme.CA()
    clients = [CLIENT, trusting(removed), trusting(kept)]
    authorities = tmp_path / "ca.pem"
    authorities.write_bytes(removed.cert_pem.bytes() + kept.cert_pem.bytes())
    certificates = certificates_in(tmp_path, ssl_ca_certs=authorities)
    assert [await is_accepted(certificates, client) for client in clients] == [False, True, True]
    authorities.write_bytes(kept.cert_pem.bytes())
    await certificates.reload()
    assert [await is_accepted(certificates, client) for client in clients] == [False, False, True]


async def test_no_handshake_fails_while_certificate_and_key_are_replaced(tmp_path, monkeypatch):
    monkeypatch.setattr(tls, "RETRY_S", 0.0)
    pairs = []
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        pairs.append(write_certificate(tmp_path / name, name))
    certificates = certificates_in(tmp_path)
    certfile, keyfile, first = tmp_path / "cert.pem", tmp_path / "key.pem", certificates.context

    def replace(source: Path, target: Path) -> None:
        shutil.copy(source, target.with_suffix(".new"))
        target.with_suffix(".new").replace(target)

    def rotate() -> None:
        while True:
            for certificate, key in pairs:
                replace(certificate, certfile)
                replace(key, keyfile)
                trio.from_thread.check_cancelled()

    async def reload() -> None:
        while True:
            await certificates.reload()

    failed = 0
    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.to_thread.run_sync, rotate)
        nursery.start_soon(reload)
        for _ in range(150):
            try:
                await handshake(certificates, CLIENT)
            except* (PermissionError, trio.BrokenResourceError):
                failed += 1
        nursery.cancel_scope.cancel()
    assert failed == 0
    assert certificates.context is not first


async def test_a_pair_that_is_complete_only_after_the_signal_is_read_once_more(tmp_path, monkeypatch, caplog):
    certificates, keyfile = certificates_in(tmp_path, "first"), tmp_path / "key.pem"
    first, old_key = certificates.context, keyfile.read_bytes()
    write_certificate(tmp_path, "second")
    new_key = keyfile.read_bytes()
    keyfile.write_bytes(old_key)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(certificates.reload)
        await until(lambda: "reloading the certificate failed" in caplog.text)
        assert certificates.context is first
        keyfile.write_bytes(new_key)
    assert certificates.context is not first


@asynccontextmanager
async def serving(folder: Path, app=app, ssl_ca_certs: Path | None = None, **limits) -> AsyncIterator[socket.socket]:
    certificates = certificates_in(folder, ssl_ca_certs=ssl_ca_certs)
    async with served_app(app, Connections(**limits), tls=certificates) as listening:
        yield listening


def secured(stream: trio.SocketStream, *protocols: str) -> trio.SSLStream:
    context = trusting()
    context.set_alpn_protocols(protocols)
    return trio.SSLStream(stream, context, server_hostname="127.0.0.1", https_compatible=True)


def client_hello() -> bytes:
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    with contextlib.suppress(ssl.SSLWantReadError):
        CLIENT.wrap_bio(incoming, outgoing, server_hostname="127.0.0.1").do_handshake()
    return outgoing.read()


def http_2_request() -> bytes:
    peer = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True))
    peer.initiate_connection()
    peer.send_headers(1, [(":method", "GET"), (":path", "/"), (":scheme", "https"), (":authority", "x")], True)
    return peer.data_to_send()


async def closed_after(stream: trio.abc.ReceiveStream) -> float:
    """Return the seconds until a connection is closed."""
    began = trio.current_time()
    with contextlib.suppress(trio.BrokenResourceError):
        while await stream.receive_some():
            """What the server sends."""
    return trio.current_time() - began


REQUESTS = {"http/1.1": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", "h2": http_2_request()}


@pytest.mark.parametrize("protocol", REQUESTS)
async def test_handshake_and_first_head_share_the_time_for_a_head(protocol, tmp_path, autojump_clock):
    async with serving(tmp_path, client_timeout_s=30) as listening, await connect(listening) as stream:
        await trio.sleep(20)
        client = secured(stream, protocol)
        await client.do_handshake()
        await client.send_all(REQUESTS[protocol][:-2])
        assert await closed_after(client) == pytest.approx(10, abs=1)


@pytest.mark.parametrize("protocol", REQUESTS)
async def test_after_the_first_head_a_connection_may_be_idle(protocol, tmp_path, autojump_clock):
    async with serving(tmp_path, client_timeout_s=30) as listening, await connect(listening) as stream:
        client = secured(stream, protocol)
        await client.send_all(REQUESTS[protocol])
        assert await client.receive_some()
        assert await closed_after(client) == pytest.approx(75, abs=1)


REFUSED = {
    "none": (lambda client: None, "TLSV13_ALERT_CERTIFICATE_REQUIRED", "SSLV3_ALERT_HANDSHAKE_FAILURE"),
    "an expired one": (
        lambda client: AUTHORITY.issue_cert("client", not_after=EXPIRED).configure_cert(client),
        *2 * ["SSLV3_ALERT_CERTIFICATE_EXPIRED"],
    ),
    "another authority's": (
        lambda client: trustme.CA().issue_cert("client").configure_cert(client),
        *2 * ["TLSV1_ALERT_UNKNOWN_CA"],
    ),
}
"""What a client presents instead of a valid certificate, and the alerts of TLS 1.3 and 1.2."""


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_3, ssl.TLSVersion.TLSv1_2])
@pytest.mark.parametrize("presented", REFUSED)
async def test_a_client_learns_by_an_alert_what_is_wrong_with_its_certificate(presented, version, tmp_path):
    """Also one that has sent a request before, of which the server reads nothing."""
    authorities = tmp_path / "ca.pem"
    AUTHORITY.cert_pem.write_to_path(authorities)
    present, *alerts = REFUSED[presented]
    async with serving(tmp_path, ssl_ca_certs=authorities) as listening, await connect(listening) as stream:
        client = trusting()
        client.maximum_version = version
        present(client)
        secured_stream = trio.SSLStream(stream, client, server_hostname="127.0.0.1", https_compatible=True)
        with pytest.raises(trio.BrokenResourceError) as raised:
            await secured_stream.send_all(REQUESTS["http/1.1"] + bytes(2**18))
            await secured_stream.receive_some()
        assert isinstance(raised.value.__cause__, ssl.SSLError)
        assert raised.value.__cause__.reason == alerts[version is ssl.TLSVersion.TLSv1_2]
        async with await connect(listening) as other:  # other clients are served
            valid = trio.SSLStream(other, trusting(AUTHORITY), server_hostname="127.0.0.1", https_compatible=True)
            await valid.send_all(REQUESTS["http/1.1"])
            assert await valid.receive_some()


@pytest.mark.parametrize("sent", [b"", client_hello()[:-1], client_hello()], ids=["nothing", "a part", "a ClientHello"])
async def test_a_handshake_that_does_not_go_on_is_ended(sent, tmp_path, autojump_clock):
    async with serving(tmp_path, client_timeout_s=30) as listening, await connect(listening) as stream:
        await stream.send_all(sent)
        assert await closed_after(stream) == pytest.approx(30, abs=1)


async def test_handshakes_of_one_address_leave_others_their_turn(tmp_path):
    """Counted by how many of its clients get an answer while the other one's handshake lasts."""
    async with serving(tmp_path) as listening, contextlib.AsyncExitStack() as open_streams:
        hello, greedy = client_hello(), [await connect(listening, "127.0.0.2") for _ in range(300)]
        have_answers = select.poll()
        for stream in greedy:
            await open_streams.enter_async_context(stream)
            await stream.send_all(hello)
            have_answers.register(stream.socket, select.POLLIN)
        other = await open_streams.enter_async_context(await connect(listening, "127.0.0.3"))
        before = len(have_answers.poll(0))
        await secured(other).do_handshake()
        assert len(have_answers.poll(0)) - before < 30


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs the program openssl")
async def test_a_client_cannot_ask_for_another_handshake(tmp_path):
    async with serving(tmp_path) as listening:
        AUTHORITY.cert_pem.write_to_path(tmp_path / "ca.pem")
        where = "{}:{}".format(*listening.getsockname())
        command = ["openssl", "s_client", "-connect", where, "-tls1_2", "-CAfile", str(tmp_path / "ca.pem")]
        asked = await trio.run_process(command, stdin=b"R\n", capture_stdout=True, capture_stderr=True, check=False)
    assert b"Verify return code: 0 (ok)" in asked.stdout
    assert b"no renegotiation" in asked.stderr


async def test_a_client_that_does_not_read_is_disconnected(tmp_path, autojump_clock):
    async def long(scope, receive, send) -> None:
        if scope["type"] == "lifespan":
            await app(scope, receive, send)
            return
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": bytes(2**26)})

    async with serving(tmp_path, long, client_timeout_s=30) as listening, await connect(listening) as stream:
        client = secured(stream, "http/1.1")
        await client.send_all(REQUESTS["http/1.1"])
        began = trio.current_time()
        with pytest.raises(trio.BrokenResourceError):
            while True:
                await client.send_all(b"x")
                await trio.sleep(1)
        assert trio.current_time() - began == pytest.approx(30, abs=2)
