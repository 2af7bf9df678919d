"""A file on the disk as a response, or the part of it that a request asks for."""

import re
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

from attrs import define, field
from quart.wrappers.response import ResponseBody

from trio_pool_serve.api.http.request import HttpRequest
from trio_pool_serve.api.http.response import HttpResponse
from trio_pool_serve.storage.durable_files import storage_errors
from trio_pool_serve.threads.offload import Offload

PIECE_BYTES = 256 * 1024

RANGE = re.compile(r"bytes=(\d{0,18})-(\d{0,18})")
"""One range; of a request for several the whole file is sent, as RFC 9110 allows."""


@define(eq=False)
class FileBody(ResponseBody):
    """The bytes of a file from one offset to another, read in threads as they are sent."""

    path: Path
    begin: int
    end: int
    offload: Offload
    _file: BinaryIO | None = field(default=None, init=False)

    async def __aenter__(self) -> Self:
        self._file = await self.offload.run("files", self._open)
        return self

    def _open(self) -> BinaryIO:
        with storage_errors(self.path):
            file = self.path.open("rb")
        file.seek(self.begin)
        return file

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes:
        assert self._file is not None  # noqa: S101  (entered)
        size = min(PIECE_BYTES, self.end - self.begin)
        if size <= 0:
            raise StopAsyncIteration
        data = await self.offload.run("files", partial(self._file.read, size))
        if not data:
            raise StopAsyncIteration
        self.begin += len(data)
        return data

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        if self._file is not None:
            self._file.close()


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
    return HttpResponse(FileBody(path, begin, end, offload), "application/octet-stream", status, tuple(headers))
