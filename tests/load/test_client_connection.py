"""The load generator's connection reads every form of response, and says how one failed."""

import ssl

import attrs
import pytest
import trio
import trio.testing
import trustme

from tests.load.raw_server import ANSWER, answering, raw_server, reset
from trio_pool_serve.load.client_connection import (
    CUT,
    KEPT_BODY,
    MAX_HEAD,
    NOT_HTTP,
    RESET,
    ClientConnection,
    NoResponseError,
    request_bytes,
)

HEAD = b"HTTP/1.1 200 OK\r\n"
CHUNKS = b"3\r\nhel\r\n2\r\nlo\r\n0\r\n\r\n"

FORMS = {
    "length": ([ANSWER], 200, b"hello", True),
    "in pieces": ([ANSWER[:9], ANSWER[9:30], ANSWER[30:]], 200, b"hello", True),
    "chunked": ([HEAD + b"Transfer-Encoding: chunked\r\n\r\n", CHUNKS], 200, b"hello", True),
    "until the end": ([HEAD + b"\r\nhello", b""], 200, b"hello", False),
    "interim": ([b"HTTP/1.1 103 Early Hints\r\n\r\n" + ANSWER], 200, b"hello", True),
    "closing": ([HEAD + b"Connection: close\r\nContent-Length: 5\r\n\r\nhello"], 200, b"hello", False),
    "HTTP/1.0": ([b"HTTP/1.0 200 OK\r\nContent-Length: 5\r\n\r\nhello"], 200, b"hello", False),
    "no content": ([b"HTTP/1.1 204 No Content\r\n\r\n"], 204, b"", True),
    "an error": ([b"HTTP/1.1 429 Busy\r\nContent-Length: 4\r\n\r\nbusy"], 429, b"busy", True),
    "as the client sends": ([b"HTTP/1.1 418 I\r\nCONTENT-LENGTH: 0\r\n\r\n"], 418, b"", True),
}


@pytest.mark.parametrize(("parts", "status", "body", "keeps_alive"), FORMS.values(), ids=FORMS)
async def test_every_form_of_response_is_read(parts: list[bytes], status: int, body: bytes, keeps_alive: bool):
    async with raw_server(answering(*parts)) as server:
        async with await ClientConnection.open(server.target, keeps_body=True) as connection:
            response = await connection.ask(request_bytes("/", b"{}"))
            assert (response.status, response.body) == (status, body)
            assert connection.keeps_alive is keeps_alive
            if keeps_alive:
                assert await connection.ask(request_bytes("/", b"{}")) == response
        assert server.connections == 1


async def test_bodies_are_kept_only_where_they_are_wanted():
    length = KEPT_BODY + 10
    long = [HEAD + b"Content-Length: %d\r\n\r\n" % length, b"x" * length]
    async with raw_server(answering(*long)) as server:
        async with await ClientConnection.open(server.target) as connection:
            assert (await connection.ask(request_bytes("/"))).body == b""
        async with await ClientConnection.open(server.target, keeps_body=True) as connection:
            assert (await connection.ask(request_bytes("/"))).body == b"x" * KEPT_BODY
            assert connection.keeps_alive


NO_RESPONSES = {
    "ssh": (answering(b"SSH-2.0-OpenSSH_9.9\r\n"), NOT_HTTP),
    "upgrade": (
        answering(b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: Upgrade\r\n\r\n"),
        NOT_HTTP,
    ),
    "wrong chunk": (answering(HEAD + b"Transfer-Encoding: chunked\r\n\r\n", b"zz\r\n"), NOT_HTTP),
    "endless head": (answering(HEAD, *[b"X: " + b"x" * MAX_HEAD + b"\r\n"] * 2), NOT_HTTP),
    "closed": (answering(b""), CUT),
    "in the head": (answering(HEAD, b""), CUT),
    "in the body": (answering(ANSWER[:-1], b""), CUT),
    "reset": (reset, RESET),
}


@pytest.mark.parametrize(("respond", "outcome"), NO_RESPONSES.values(), ids=NO_RESPONSES)
async def test_what_is_no_response_or_cut_off_is_said_to_be_none(respond, outcome: str):
    async with raw_server(respond) as server, await ClientConnection.open(server.target) as connection:
        with pytest.raises(NoResponseError) as raised:
            await connection.ask(request_bytes("/", b"{}"))
        assert (raised.value.outcome, raised.value.is_stale, connection.keeps_alive) == (outcome, False, False)


async def test_a_connection_that_the_server_has_closed_in_between_is_stale():
    async with raw_server(answering(ANSWER, b"")) as server, await ClientConnection.open(server.target) as connection:
        await connection.ask(request_bytes("/", b"{}"))
        with pytest.raises(NoResponseError) as raised:
            await connection.ask(request_bytes("/", b"{}"))
    assert raised.value.is_stale


async def test_a_request_that_is_cancelled_leaves_a_connection_of_no_use():
    async with raw_server(answering()) as server, await ClientConnection.open(server.target) as connection:
        with trio.move_on_after(0.01) as scope:
            await connection.ask(request_bytes("/"))
        assert scope.cancelled_caught
        assert not connection.keeps_alive


async def test_tls_is_spoken_and_certificates_are_checked():
    authority = trustme.CA()
    ours, theirs = ssl.create_default_context(), ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("127.0.0.1").configure_cert(theirs)
    async with raw_server(answering(ANSWER), theirs) as server:
        target = attrs.evolve(server.target, tls=ours)
        with pytest.raises(trio.BrokenResourceError) as raised:
            await ClientConnection.open(target)
        assert isinstance(raised.value.__cause__, ssl.SSLCertVerificationError)
        authority.configure_trust(ours)
        async with await ClientConnection.open(target, keeps_body=True) as connection:
            assert (await connection.ask(request_bytes("/"))).body == b"hello"
