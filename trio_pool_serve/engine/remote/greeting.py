"""The greeting of a link over TCP: versions, and proofs that both ends have the key.

API process → engine: ``Greeting``. Engine → API process: ``Challenge``. Then ``Proof`` from the API process, and
``Proof`` from the engine. Either end may send ``Refusal`` instead of its message, and closes the connection. These
messages have the frames of the link and a few hundred bytes each, and all must arrive within ``GREETING_TIMEOUT_S``.
Unix sockets have no greeting.

The proofs show who is at the other end. Later messages are neither encrypted nor signed: anyone who can change
packets between two machines can change rows. Run links on a private network or through an encrypted tunnel.
"""

import hmac
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Literal, TypeAlias, TypeVar

import msgspec
import trio
from attrs import define

import trio_pool_serve
from trio_pool_serve.engine.remote.link import LinkRefusedError
from trio_pool_serve.engine.remote.wire import FromEngine, ToEngine
from trio_pool_serve.processes.framed_stream import FramedStream

Message = TypeVar("Message")

MIN_KEY_CHARACTERS = 32
"""Anyone who listens on the network sees a proof and can try keys against it: only long random keys withstand that."""

MAX_FILE_BYTES = 64 * 1024


@define(eq=False)
class LinkKeys:
    """The keys of a file, one per line: this end proves itself by the first, and accepts any of them.

    Keys passed to the constructor have no file.
    """

    path: Path = Path(os.devnull)
    keys: Sequence[bytes] = ()

    def read(self) -> None:
        """Read the file. Blocks. Raises ``ValueError`` or ``OSError`` with a message for the user."""
        with self.path.open("rb") as file:
            # Not all of it: a wrong path may name a device that never ends.
            lines = [line.strip() for line in file.read(MAX_FILE_BYTES).splitlines()]
        keys = [line for line in lines if line and not line.startswith(b"#")]
        if not keys:
            raise ValueError(f"--key-file: {self.path} contains no key.")
        if short := [number for number, key in enumerate(keys, 1) if len(key) < MIN_KEY_CHARACTERS]:
            raise ValueError(
                f"--key-file: key {short[0]} in {self.path} has fewer than {MIN_KEY_CHARACTERS} characters. "
                "Generate one with `openssl rand -hex 32`."
            )
        self.keys = keys


def proof(key: bytes, end: str, transcript: bytes) -> bytes:
    """Return a proof of holding ``key``: HMAC-SHA256 (RFC 2104) of the name of the ``end`` and the greeting.

    Including the end prevents a proof from being reflected as the other end's.
    """
    return hmac.digest(key, end.encode() + b"\0" + transcript, "sha256")


def key_of_proof(keys: Sequence[bytes], end: str, transcript: bytes, shown: bytes) -> bytes:
    """Return the key with which the other end made its proof. Raises ``LinkRefusedError`` if it is none of ``keys``."""
    # All keys are compared, so that the time reveals nothing.
    found = [key for key in keys if hmac.compare_digest(proof(key, end, transcript), shown)]
    if not found:
        raise LinkRefusedError("the keys of the two ends differ")
    return found[0]


WIRE_VERSION = 9
"""Ends of different versions refuse each other. Raise it with every change of the messages, including params:
``tests/engine/remote/test_wire_version.py`` fails otherwise."""

NONCE_BYTES = 32

MAX_GREETING_BYTES = 1024

GREETING_TIMEOUT_S = 5.0

Nonce: TypeAlias = Annotated[bytes, msgspec.Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]
Text: TypeAlias = Annotated[str, msgspec.Meta(max_length=300)]


class Greeting(msgspec.Struct, tag=True, array_like=True):
    """The first message of an API process. After ``timeout_s`` of silence, each end considers the other lost."""

    magic: Literal["trio_pool_serve engine link"]
    wire_version: int
    software: Text
    nonce: Nonce
    timeout_s: Annotated[float, msgspec.Meta(ge=0.1, le=3600)]


class Challenge(msgspec.Struct, tag=True, array_like=True):
    """The engine's answer to a greeting."""

    wire_version: int
    software: Text
    nonce: Nonce


class Proof(msgspec.Struct, tag=True, array_like=True):
    """Proof that one end has a key: see ``proof``."""

    proof: Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]


class Refusal(msgspec.Struct, tag=True, array_like=True):
    """The reason why the connection ends."""

    reason: Text


AnyGreeting: TypeAlias = Greeting | Challenge | Proof | Refusal


UNSENT_BYTES = 128 * 1024

TCP_NOTSENT_LOWAT = 25
"""The option on Linux; the socket module of Python 3.11 does not define it."""


def limit_waiting(stream: trio.SocketStream, timeout_s: float) -> None:
    """Make the kernel break the connection if sent bytes are not acknowledged for ``timeout_s`` seconds (Linux).

    The kernel also buffers no more than ``UNSENT_BYTES``. Otherwise it would accept megabytes, and then nothing until a
    third of them was sent: a slow path would look like one on which nothing can be sent.
    """
    with suppress(OSError):  # not a TCP socket
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(1000 * timeout_s))
        stream.setsockopt(socket.IPPROTO_TCP, TCP_NOTSENT_LOWAT, UNSENT_BYTES)


async def greet(stream: trio.SocketStream, keys: Sequence[bytes], timeout_s: float) -> FramedStream[FromEngine]:
    """Greet the engine that has accepted a connection; return the stream of its messages.

    Raises ``LinkRefusedError``, also if the engine does not answer within ``GREETING_TIMEOUT_S``, and
    ``trio.BrokenResourceError``. Cancellation: at once; the stream is unusable afterwards.
    """
    # Both ends choose a part of the transcript: neither can be made to accept a proof that was recorded earlier.
    nonce = os.urandom(NONCE_BYTES)
    with _greeting_stream(stream, "the engine") as framed:
        await framed.send(
            Greeting("trio_pool_serve engine link", WIRE_VERSION, trio_pool_serve.__version__, nonce, timeout_s)
        )
        challenge = await _receive(framed, Challenge, "engine")
        transcript = nonce + challenge.nonce
        await framed.send(Proof(proof(keys[0], "api", transcript)))
        shown = await _receive(framed, Proof, "engine")
    key_of_proof(keys, "engine", transcript, shown.proof)
    limit_waiting(stream, timeout_s)  # the greeting has a limit of its own
    return framed.continued(FromEngine)


async def answer_greeting(stream: trio.SocketStream, keys: Sequence[bytes]) -> tuple[FramedStream[ToEngine], float]:
    """Check the greeting on an accepted connection; return the stream of rows and the link's ``timeout_s``.

    Raises ``LinkRefusedError``, after sending the reason, unless the other end is an API process of this version with a
    valid key. Raises ``trio.BrokenResourceError``. Cancellation: at once.
    """
    try:
        with _greeting_stream(stream, "the other end") as framed:
            greeting = await _receive(framed, Greeting, "API process")
            nonce = os.urandom(NONCE_BYTES)
            await framed.send(Challenge(WIRE_VERSION, trio_pool_serve.__version__, nonce))
            transcript = greeting.nonce + nonce
            shown = await _receive(framed, Proof, "API process")
            key = key_of_proof(keys, "api", transcript, shown.proof)
            # By the other end's key: while keys are changed, it may not have this end's first one yet. And after its
            # proof: without a key, the other end gets no proof to try keys against.
            await framed.send(Proof(proof(key, "engine", transcript)))
    except LinkRefusedError as error:
        # The log of the other end says why, too. It may not read any more.
        with suppress(trio.BrokenResourceError), trio.move_on_after(GREETING_TIMEOUT_S):
            await framed.send(Refusal(str(error)[:300]))  # what a ``Text`` may have
        raise
    limit_waiting(stream, greeting.timeout_s)
    return framed.continued(ToEngine), greeting.timeout_s


def in_one_line(text: str) -> str:
    """Return text of the other end for the log: unprintable characters could forge a line."""
    return "".join(character if character.isprintable() else "?" for character in text)


@contextmanager
def _greeting_stream(stream: trio.SocketStream, who: str) -> Iterator[FramedStream[AnyGreeting]]:
    """Return the stream of a greeting; raise ``LinkRefusedError`` after ``GREETING_TIMEOUT_S``."""
    # A stranger may be at the other end: nothing is logged, and no memory is taken for more than a greeting.
    framed = FramedStream[AnyGreeting](
        stream, AnyGreeting, MAX_GREETING_BYTES, max_payload_bytes=0, logs_invalid_frames=False
    )
    with trio.move_on_after(GREETING_TIMEOUT_S) as limit:
        yield framed
    if limit.cancelled_caught:
        raise LinkRefusedError(f"{who} did not finish its greeting within {GREETING_TIMEOUT_S:g} s")


async def _receive(stream: FramedStream[AnyGreeting], kind: type[Message], other_end: str) -> Message:
    """Return the next message, which is a ``kind``. Raises ``LinkRefusedError``, also if the other end has refused."""
    match await stream.receive():
        case None if stream.invalid_frame:
            raise LinkRefusedError(f"the first message is not a greeting: {in_one_line(stream.invalid_frame)}")
        case None:  # as after a probe of the port, which is nothing to log
            raise trio.BrokenResourceError("the connection ended during the greeting")
        case Refusal(reason), _ if kind is not Greeting:  # before a greeting, nothing was sent that can be refused
            raise LinkRefusedError(in_one_line(reason))
        case message, _ if isinstance(message, kind):
            if isinstance(message, Greeting | Challenge) and message.wire_version != WIRE_VERSION:
                raise LinkRefusedError(
                    f"the {other_end} runs version {in_one_line(message.software)} (wire version "
                    f"{message.wire_version}), this process {trio_pool_serve.__version__} (wire version {WIRE_VERSION})"
                )
            return message
    raise LinkRefusedError("a message of the greeting arrived out of order")
