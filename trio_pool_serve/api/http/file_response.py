"""A file on the disk as a response, or the part of it that a request asks for."""

import re
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import BinaryIO

from trio_pool_serve.api.http.request import HttpRequest
from trio_pool_serve.api.http.response import HttpResponse
from trio_pool_serve.storage.durable_files import storage_errors
from trio_pool_serve.threads.offload import Offload

PIECE_BYTES = 256 * 1024

RANGE = re.compile(r"bytes=(\d{0,18})-(\d{0,18})")
"""One range; of a request for several the whole file is sent, as RFC 9110 allows."""


@asynccontextmanager
async def _file_body(path: Path, begin: int, end: int, offload: Offload) -> AsyncIterator[AsyncIterator[bytes]]:
    """Return the bytes of a file from one offset to another, read in threads as they are sent."""
    file = await offload.run("files", partial(_open_at, path, begin))
    try:
        async with aclosing(_pieces(file, end - begin, offload)) as pieces:
            yield pieces
    finally:
        file.close()


def _open_at(path: Path, begin: int) -> BinaryIO:
    with storage_errors(path):
        file = path.open("rb")
    file.seek(begin)
    return file


async def _pieces(file: BinaryIO, left: int, offload: Offload) -> AsyncGenerator[bytes, None]:
    while left and (data := await offload.run("files", partial(file.read, min(PIECE_BYTES, left)))):
        left -= len(data)
        yield data


def file_response(request: HttpRequest, path: Path, size: int, offload: Offload) -> HttpResponse:
    """Return the response with a file of ``size`` bytes, or the part that ``Range`` asks for: 206, or 416."""
    begin, end, status = 0, size, 200
    headers = [("accept-ranges", "bytes")]
    asked = RANGE.fullmatch(request.header(b"range") or "")
    first, last = asked.groups() if asked is not None else ("", "")
    if (first or last) and not (first and last and int(last) < int(first)):
        begin = int(first) if first else max(0, size - int(last))
        end = min(size, int(last) + 1) if first and last else size
        if begin >= end:
            error = {"message": f"The file has {size} bytes.", "type": "RangeError", "param": "range", "code": 416}
            return HttpResponse.json({"error": error}, 416).with_headers({"content-range": f"bytes */{size}"})
        status = 206
        headers.append(("content-range", f"bytes {begin}-{end - 1}/{size}"))
    headers.append(("content-length", str(end - begin)))
    if request.scope["method"] == "HEAD":
        end = begin
    return HttpResponse(_file_body(path, begin, end, offload), "application/octet-stream", status, tuple(headers))
