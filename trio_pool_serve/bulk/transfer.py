"""Files that come from a URL, or go to one."""

import fcntl
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from email.utils import parsedate_to_datetime
from functools import partial
from pathlib import Path
from typing import BinaryIO, TypeVar

import httpx
import trio

from trio_pool_serve.bulk.file_urls import without_secrets
from trio_pool_serve.errors import StorageInUseError, TransferError
from trio_pool_serve.storage.durable_files import AppendedFile, publish, storage_errors
from trio_pool_serve.threads.offload import Offload

T = TypeVar("T")

PAUSES_S = (1.0, 2.0, 5.0, 10.0)
"""Before another attempt; with the first one there are five, as of vLLM."""

TIMEOUT = httpx.Timeout(connect=30.0, read=1000.0, write=60.0, pool=None)
"""Seconds. After an upload, a store may read for a while what it has received."""

PART_BYTES = 2**20

TEMPORARY_STATUSES = {408, 425, 429}
"""And those from 500 on: the same request may succeed later."""


async def download(url: str, path: Path, offload: Offload) -> None:
    """Get a file, which has its name only when it is complete, and the time at which the server says it was changed.

    Raises ``TransferError`` after five attempts, ``StorageError``, and ``StorageInUseError`` if another process is
    downloading it. Cancellation: at once.
    """
    temporary = path.with_name(f"{path.name}.tmp")
    file = await offload.run("files", partial(_open_alone, temporary))
    try:
        changed_s = await _attempt("GET", url, lambda client: _get(client, url, file, offload))
        if changed_s is not None:
            await offload.run("files", lambda: os.utime(temporary, (changed_s, changed_s)))
        await offload.run("files", partial(publish, temporary, path))
    finally:
        file.close()


async def upload(path: Path, url: str, offload: Offload) -> None:
    """Put a file. Raises ``TransferError`` after five attempts, and ``StorageError``. Cancellation: at once."""

    async def put(client: httpx.AsyncClient) -> None:
        with storage_errors(path):
            file = await offload.run("files", lambda: path.open("rb"))
        try:
            # Stores do not take uploads in chunks of HTTP/1.1: they need the length.
            headers = {"content-length": str(os.fstat(file.fileno()).st_size), "content-type": "application/jsonl"}
            response = await client.put(url, content=_parts_of(file, offload), headers=headers)
        finally:
            file.close()
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


async def _get(client: httpx.AsyncClient, url: str, file: AppendedFile, offload: Offload) -> float | None:
    """Write what a URL has; return when it was changed, in seconds since the epoch."""
    await offload.run("files", partial(file.file.truncate, 0))
    async with client.stream("GET", url) as response:
        response.raise_for_status()
        async for part in response.aiter_bytes(PART_BYTES):
            await offload.run("files", partial(file.append, part))
    try:
        return parsedate_to_datetime(response.headers["last-modified"]).timestamp()
    except (KeyError, ValueError):
        return None


async def _parts_of(file: BinaryIO, offload: Offload) -> AsyncIterator[bytes]:
    while part := await offload.run("files", partial(file.read, PART_BYTES)):
        yield part


async def _attempt(method: str, url: str, request: Callable[[httpx.AsyncClient], Awaitable[T]]) -> T:
    for pause_s in (*PAUSES_S, None):
        try:
            async with httpx.AsyncClient(timeout=TIMEOUT, follow_redirects=True) as client:
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
