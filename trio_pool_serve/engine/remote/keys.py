"""The secret keys by which an engine and API processes on other machines authenticate each other."""

import hashlib
import hmac
import logging
import os
from collections.abc import Sequence
from pathlib import Path

from attrs import define

from trio_pool_serve.threads.offload import Offload

logger = logging.getLogger(__name__)

MIN_KEY_CHARACTERS = 32
"""Anyone who listens on the network sees a proof and can try keys against it: only long random keys withstand that."""

MAX_FILE_BYTES = 64 * 1024


class LinkRefusedError(Exception):
    """One end of a connection has refused the other; the message says why."""


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
            lines = [line.strip() for line in file.read(MAX_FILE_BYTES).splitlines()]
        keys = [line for line in lines if line and not line.startswith(b"#")]
        if not keys:
            raise ValueError(f"--key-file: {self.path} has no key.")
        if short := [number for number, key in enumerate(keys, 1) if len(key) < MIN_KEY_CHARACTERS]:
            raise ValueError(
                f"--key-file: key {short[0]} of {self.path} has fewer than {MIN_KEY_CHARACTERS} characters; "
                "`openssl rand -hex 32` makes one."
            )
        self.keys = keys

    async def reload(self, offload: Offload) -> None:
        """Read the file again; if that fails, log it and keep the keys. Cancellation: at once; the keys are kept."""
        try:
            await offload.run("load", self.read)
        except (OSError, ValueError) as error:
            logger.error("reloading the keys failed, the old ones are kept: %s", error)  # noqa: TRY400  (the message says it all)


def proof(key: bytes, end: str, transcript: bytes) -> bytes:
    """Return a proof of holding ``key``: HMAC-SHA256 (RFC 2104) of the name of the ``end`` and the greeting.

    Including the end prevents a proof from being reflected as the other end's.
    """
    return hmac.digest(key, end.encode() + b"\0" + transcript, hashlib.sha256)


def key_of_proof(keys: Sequence[bytes], end: str, transcript: bytes, shown: bytes) -> bytes:
    """Return the key with which the other end made its proof. Raises ``LinkRefusedError`` if it is none of ``keys``."""
    found = None
    for key in keys:  # all of them, so that the time reveals nothing
        if hmac.compare_digest(proof(key, end, transcript), shown):
            found = key
    if found is None:
        raise LinkRefusedError("the keys of the two ends differ")
    return found
