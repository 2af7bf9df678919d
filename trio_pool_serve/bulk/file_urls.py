"""URLs in place of paths: which strings are URLs, and files that are downloaded and uploaded."""

import fcntl
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from email.utils import parsedate_to_datetime
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO
from urllib.parse import urlsplit, urlunsplit

import trio

from trio_pool_serve.errors import BulkInputError, StorageInUseError, TransferError, require
from trio_pool_serve.storage.durable_files import AppendedFile, publish, storage_errors
from trio_pool_serve.threads.offload import Offload

if TYPE_CHECKING:
    from httpx import AsyncClient

PAUSES_S = (1.0, 2.0, 5.0, 10.0)
"""Pauses before further attempts; with the first one there are five attempts, as in vLLM."""

READ_TIMEOUT_S = 1000.0
"""After an upload, a store may need a while to process the file."""

PART_BYTES = 2**20

TEMPORARY_STATUSES = {408, 425, 429}
"""The same request may succeed later, as after statuses from 500 on."""


def is_url(path_or_url: str) -> bool:
    """Return whether something is a URL rather than a path, as vLLM decides it."""
    return path_or_url.startswith(("http://", "https://"))


def without_secrets(url: str) -> str:
    """Return a URL without the parts that may be secret: user and password, and the query with a signature."""
    parts = urlsplit(url)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


def digest_of_url(url: str) -> str:
    """Return twelve letters and digits for a URL; its secrets do not change them."""
    return sha256(without_secrets(url).encode()).hexdigest()[:12]


def check_path_or_url(path_or_url: str) -> None:
    """Raise ``BulkInputError`` for a URL without a host, or one that cannot be parsed."""
    if not is_url(path_or_url):
        return
    try:
        host = urlsplit(path_or_url).hostname
    except ValueError as error:
        raise BulkInputError(f"{path_or_url!r} is not a URL: {error}.") from error
    require(bool(host), f"{path_or_url!r} is a URL without a host.", BulkInputError)


async def download(url: str, path: Path, offload: Offload) -> None:
    """Download a file; ``path`` exists only once it is complete, with the server's modification time.

    Raises ``TransferError`` after five attempts, ``StorageError``, and ``StorageInUseError`` if another process is
    downloading it. Cancellation: at once.
    """
    temporary = path.with_name(f"{path.name}.tmp")
    file = await offload.run("files", partial(_open_alone, temporary))

    async def get(client: "AsyncClient") -> None:
        await offload.run("files", partial(file.file.truncate, 0))
        async with client.stream("GET", url) as response:
            response.raise_for_status()
            async for part in response.aiter_bytes(PART_BYTES):
                await offload.run("files", partial(file.append, part))
        with suppress(KeyError, ValueError):
            changed_s = parsedate_to_datetime(response.headers["last-modified"]).timestamp()
            await offload.run("files", lambda: os.utime(temporary, (changed_s, changed_s)))

    try:
        await _attempt("GET", url, get)
        await offload.run("files", partial(publish, temporary, path))
    finally:
        file.close()


async def upload(path: Path, url: str, offload: Offload) -> None:
    """Upload a file with PUT. Raises ``TransferError`` after five attempts, and ``StorageError``.

    Cancellation: at once.
    """

    async def put(client: "AsyncClient") -> None:
        with storage_errors(path):
            file = await offload.run("files", lambda: path.open("rb"))
        with file:
            # Stores do not take uploads in chunks of HTTP/1.1: they need the length.
            headers = {"content-length": str(os.fstat(file.fileno()).st_size), "content-type": "application/jsonl"}
            response = await client.put(url, content=_parts_of(file, offload), headers=headers)
        response.raise_for_status()

    await _attempt("PUT", url, put)


def _open_alone(path: Path) -> AppendedFile:
    """Open a file to write to, with a lock that ends with the process."""
    with storage_errors(path):
        file = path.open("ab", buffering=0)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            raise StorageInUseError(f"Another run is downloading its input: {path} is in use.") from None
        return AppendedFile(path, file, 0)


async def _parts_of(file: BinaryIO, offload: Offload) -> AsyncIterator[bytes]:
    while part := await offload.run("files", partial(file.read, PART_BYTES)):
        yield part


async def _attempt(method: str, url: str, request: Callable[["AsyncClient"], Awaitable[None]]) -> None:
    import httpx  # imported here: the command line starts without it

    timeout = httpx.Timeout(connect=30.0, read=READ_TIMEOUT_S, write=60.0, pool=None)
    for pause_s in (*PAUSES_S, None):
        try:
            async with httpx.AsyncClient(timeout=timeout, follow_redirects=True) as client:
                return await request(client)
        except httpx.HTTPStatusError as error:
            status = error.response.status_code
            reason = f"status {status} {error.response.reason_phrase}"
            is_final = status < httpx.codes.INTERNAL_SERVER_ERROR and status not in TEMPORARY_STATUSES
        except (httpx.TransportError, httpx.InvalidURL) as error:
            reason, is_final = str(error) or type(error).__name__, isinstance(error, httpx.InvalidURL)
        if pause_s is None or is_final:
            raise TransferError(f"{method} {without_secrets(url)}: {reason}.")
        await trio.sleep(pause_s)
    raise AssertionError  # the last pause is None
