"""Who may connect to an engine by TCP, and what becomes of all others."""

import logging
import math
import os
import struct
from collections.abc import AsyncIterator

import pytest
import trio

from tests.conftest import until
from tests.engine.remote.replicas import Replica, asking, frame_of, keys_of, request
from trio_pool_serve.engine.engine import Engine
from trio_pool_serve.engine.remote import device_server, greeting
from trio_pool_serve.engine.remote.greeting import (
    WIRE_VERSION,
    AnyGreeting,
    Challenge,
    Greeting,
    LinkKeys,
    Proof,
    Refusal,
    answer_greeting,
    greet,
    key_of_proof,
    proof,
)
from trio_pool_serve.engine.remote.link import LinkRefusedError
from trio_pool_serve.processes.framed_stream import FramedStream

KEY, OTHER_KEY = b"k" * 32, b"o" * 32
NONCE = bytes(32)


@pytest.fixture
async def engine(replica: Replica) -> AsyncIterator[Engine]:
    """A link that has been made before, and is there at the end of each test as it was."""
    async with asking(replica) as engine:
        await engine.wait_ready()
        hello = engine.devices.links[0].hello
        yield engine
        assert (await engine.submit(request(5))).values[0][1] == 5
        assert engine.devices.links[0].hello is hello, "it is the same connection"


async def connect(replica: Replica, source: str = "127.0.0.1") -> trio.SocketStream:
    return await trio.open_tcp_stream(replica.address.host, replica.address.port, local_address=source)


async def answers_to(stream: trio.SocketStream, data: bytes) -> bytes:
    """Send something, and return all that comes back until the engine ends the connection."""
    received = b""
    async with stream:
        with trio.fail_after(20):
            try:
                await stream.send_all(data)
                while more := await stream.receive_some():
                    received += more
            except trio.BrokenResourceError:
                """Ended while something was on its way."""
    return received


def greeting_of(**changes: object) -> Greeting:
    fields = {
        "magic": "trio_pool_serve engine link",
        "wire_version": WIRE_VERSION,
        "software": "1",
        "nonce": NONCE,
        "timeout_s": 1.5,
    }
    return Greeting(**{**fields, **changes})


NO_GREETINGS = {
    "noise": os.urandom(256),
    "HTTP": b"GET / HTTP/1.1\r\nHost: a\r\n\r\n",
    "TLS": bytes.fromhex("1603010200010001fc0303") + bytes(500),
    "a header that is too long": struct.pack("<IQ", 2**32 - 1, 0),
    "a header of more than a greeting": struct.pack("<IQ", 1025, 0) + b"x" * 1025,
    "a payload": frame_of(greeting_of(), b"x"),
    "a message of the link": frame_of(["Withdraw", [1]]),
    "another magic": frame_of(greeting_of(magic="hello")),
    "a short nonce": frame_of(greeting_of(nonce=b"short")),
    "a long name": frame_of(greeting_of(software="x" * 301)),
    "no timeout": frame_of(greeting_of(timeout_s=0)),
    "a timeout that is no number": frame_of(greeting_of(timeout_s=float("nan"))),
    "a timeout without end": frame_of(greeting_of(timeout_s=float("inf"))),
    "a proof before the challenge": frame_of(Proof(bytes(32))),
    "a challenge": frame_of(Challenge(WIRE_VERSION, "1", NONCE)),
    "two greetings": frame_of(greeting_of()) * 2,
    "a wrong proof": frame_of(greeting_of()) + frame_of(Proof(bytes(32))),
    "a refusal": frame_of(Refusal("no")),
    "very deep": struct.pack("<IQ", 1024, 0) + b"\x91" * 1024,
}


@pytest.mark.parametrize("data", NO_GREETINGS.values(), ids=NO_GREETINGS)
async def test_what_is_no_greeting_is_refused_and_nobody_else_disturbed(replica, engine, data):
    before = replica.listener.refused
    received = await answers_to(await connect(replica), data)
    assert b"Hello" not in received
    assert replica.listener.refused == before + 1
    assert len(replica.engine.connections) == 1


@pytest.mark.parametrize("version", [WIRE_VERSION - 1, WIRE_VERSION + 1])
async def test_an_api_process_of_another_version_is_told_both(replica, engine, version):
    received = await answers_to(await connect(replica), frame_of(greeting_of(wire_version=version, software="0.0.7")))
    assert b"0.0.7" in received
    assert f"version {WIRE_VERSION}".encode() in received


async def _pair() -> tuple[trio.SocketStream, trio.SocketStream]:
    left, right = trio.socket.socketpair()
    return trio.SocketStream(left), trio.SocketStream(right)


async def greeted(ours: list[bytes], theirs: list[bytes]) -> list[object]:
    """Return what both ends, an API process with ``ours`` and an engine with ``theirs``, find out."""
    client, server = await _pair()
    found: list[object] = [None, None]

    async def run(index: int, end) -> None:
        try:
            found[index] = await end()
        except (LinkRefusedError, trio.BrokenResourceError) as error:
            found[index] = error

    async with client, server, trio.open_nursery() as nursery:
        nursery.start_soon(run, 0, lambda: greet(client, ours, 2.5))
        nursery.start_soon(run, 1, lambda: answer_greeting(server, theirs))
    return found


@pytest.mark.parametrize(
    ("ours", "theirs"), [([KEY], [KEY]), ([OTHER_KEY, KEY], [KEY, OTHER_KEY]), ([KEY], [OTHER_KEY, KEY])]
)
async def test_ends_with_a_common_key_are_linked_and_agree_on_the_timeout(ours, theirs):
    stream, (_, timeout_s) = await greeted(ours, theirs)
    assert isinstance(stream, FramedStream)
    assert timeout_s == 2.5


async def test_the_ends_of_two_keys_are_told_that_they_differ():
    for outcome in await greeted([KEY], [OTHER_KEY]):
        assert isinstance(outcome, LinkRefusedError)
        assert "keys" in str(outcome)


@pytest.mark.parametrize(
    ("version", "message"),
    [(WIRE_VERSION + 1, r"the engine runs version 9\.9"), (WIRE_VERSION, "keys")],
    ids=["another version", "without the key"],
)
async def test_an_impostor_of_an_engine_is_refused(version, message):
    client, server = await _pair()

    async def impostor() -> None:
        framed = FramedStream[AnyGreeting](server, AnyGreeting)
        await framed.receive()
        await framed.send(Challenge(version, "9.9", NONCE))
        shown, _ = await framed.receive()
        await framed.send(Proof(shown.proof))  # sent back

    async with client, server, trio.open_nursery() as nursery:
        nursery.start_soon(impostor)
        with pytest.raises(LinkRefusedError, match=message):
            await greet(client, [KEY], 1.5)
        nursery.cancel_scope.cancel()


def test_a_proof_is_of_one_end_one_key_and_one_greeting():
    shown = proof(KEY, "api", b"1")
    assert key_of_proof([OTHER_KEY, KEY], "api", b"1", shown) == KEY
    for keys, end, transcript in (
        ([OTHER_KEY], "api", b"1"),
        ([KEY], "engine", b"1"),
        ([KEY], "api", b"2"),
        ([], "api", b"1"),
    ):
        with pytest.raises(LinkRefusedError):
            key_of_proof(keys, end, transcript, shown)


KEY_FILES = {
    "empty": ("", "contains no key"),
    "only comments": ("# a comment\n\n", "contains no key"),
    "too short": ("k" * 31, "fewer than 32"),
    "a second one that is too short": ("k" * 32 + "\nshort", "key 2"),
}


@pytest.mark.parametrize(("text", "message"), KEY_FILES.values(), ids=KEY_FILES)
def test_files_of_keys_that_cannot_be_used_are_refused(tmp_path, text, message):
    (tmp_path / "key").write_text(text)
    with pytest.raises(ValueError, match=message):
        LinkKeys(tmp_path / "key").read()


def test_keys_are_lines_without_comments_and_blanks(tmp_path):
    assert keys_of(tmp_path / "key", "# old and new", f"  {'n' * 40} ", "", "o" * 32).keys == [b"n" * 40, b"o" * 32]


async def test_connections_that_stop_within_the_greeting_are_ended(replica, engine, monkeypatch):
    monkeypatch.setattr(greeting, "GREETING_TIMEOUT_S", 0.2)
    for sent in (b"", frame_of(greeting_of())[:20], frame_of(greeting_of())):
        assert b"Hello" not in await answers_to(await connect(replica), sent)
    assert replica.listener.refused == 3


async def test_a_peer_that_sends_a_byte_at_a_time_has_no_longer_than_others(replica, engine, monkeypatch):
    monkeypatch.setattr(greeting, "GREETING_TIMEOUT_S", 0.3)

    async with await connect(replica) as stream:
        with trio.fail_after(20), pytest.raises(trio.BrokenResourceError):
            for byte in frame_of(greeting_of()):
                await stream.send_all(bytes([byte]))
                await trio.sleep(0.02)
    assert replica.listener.refused == 1


async def test_connections_that_open_and_close_are_neither_counted_nor_logged(replica, engine, caplog):
    """A probe of the port does so every few seconds."""
    with caplog.at_level(logging.DEBUG):
        for _ in range(20):
            await (await connect(replica)).aclose()
        await until(lambda: not replica.listener._greeting)
    assert replica.listener.refused == 0
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


async def test_unfinished_greetings_of_one_address_do_not_end_those_of_another(replica, engine, monkeypatch):
    monkeypatch.setattr(device_server, "MAX_GREETING", 5)
    first = await connect(replica)
    await until(lambda: len(replica.listener._greeting) == 1)
    others = [await connect(replica, "127.0.0.2") for _ in range(8)]
    with trio.fail_after(10):
        for stream in others[:4]:
            assert await stream.receive_some() == b"", "it is closed"
    assert "127.0.0.1" in replica.listener._greeting.values()
    assert len(replica.listener._greeting) == 5
    async with asking(replica) as another:
        await another.wait_ready()
    for stream in (first, *others):
        await stream.aclose()


async def test_many_refusals_are_one_line_of_the_log_in_a_second(replica, engine, caplog):
    for _ in range(50):
        await answers_to(await connect(replica), NO_GREETINGS["noise"])
    lines = [record for record in caplog.records if "refused a connection" in record.message]
    assert replica.listener.refused == 50
    assert 1 <= len(lines) < 25


async def test_what_a_stranger_says_makes_no_line_of_the_log(replica, engine, caplog):
    for said in (greeting_of(wire_version=0, software="1\nCRITICAL all is lost"), Refusal("no\nCRITICAL all is lost")):
        caplog.clear()
        replica.listener._logged_at = -math.inf
        await answers_to(await connect(replica), frame_of(said))
        (refusal,) = [record.getMessage() for record in caplog.records if "refused a connection" in record.message]
        assert "\n" not in refusal
        assert ("CRITICAL" in refusal) == isinstance(said, Greeting), "a refusal of what was not said is none"


@pytest.mark.parametrize("checkpoints", range(12))
async def test_a_greeting_can_be_cancelled_anywhere(replica, engine, checkpoints):
    async def connect_and_close() -> None:
        await (await replica.connect()).aclose()

    with trio.CancelScope() as scope:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(connect_and_close)
            for _ in range(checkpoints):
                await trio.lowlevel.checkpoint()
            scope.cancel()
    await until(lambda: not replica.listener._greeting and len(replica.engine.connections) == 1)
