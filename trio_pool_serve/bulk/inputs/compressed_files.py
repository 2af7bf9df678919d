"""Bytes of a file that is compressed, or not."""

import gzip
import io
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO, cast

from trio_pool_serve.bulk.table_formats import Compression, import_extra
from trio_pool_serve.errors import BulkInputError

READ_BYTES = 2**18

ZSTD_READ_BYTES = 2048
"""Of compressed bytes. A block of zstd has 4 bytes or more and makes 128 KiB, so this makes 64 MiB at most."""


@contextmanager
def read_errors(name: str) -> Iterator[None]:
    """Raise ``BulkInputError`` with the name of the file for what the system and decompression say of it."""
    try:
        yield
    except OSError as error:
        raise BulkInputError(f"{name}: {error.strerror or error}.") from error
    except (EOFError, zlib.error) as error:
        raise BulkInputError(f"{name} is truncated or damaged: {str(error).removesuffix('.')}.") from error


def decompressed(file: BinaryIO, compression: Compression) -> BinaryIO:
    """Return the content of all members or frames of a file; a damaged one raises ``EOFError`` or ``OSError``."""
    if compression == "gz":
        return cast("BinaryIO", gzip.GzipFile(fileobj=file))
    if compression == "zst":
        return io.BufferedReader(ZstdFrames(file), READ_BYTES)
    return file


class ZstdFrames(io.RawIOBase):
    """The content of the zstd frames of a file. One that ends inside a frame raises ``EOFError``."""

    def __init__(self, file: BinaryIO) -> None:
        self._zstandard = import_extra("zstandard", "Reading .zst files")
        self._file = file
        self._frame: Any = None
        self._unread = b""
        self._content = memoryview(b"")

    def readable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill the buffer in part; return how many bytes were written to it, 0 at the end."""
        while not self._content:
            compressed = self._unread or self._file.read(ZSTD_READ_BYTES)
            if not compressed:
                if self._frame is not None:
                    raise EOFError("The file ends inside a zstd frame")
                return 0
            self._decompress(compressed)
        n = min(len(buffer), len(self._content))
        buffer[:n] = self._content[:n]
        self._content = self._content[n:]
        return n

    def _decompress(self, compressed: bytes) -> None:
        self._frame = self._frame or self._zstandard.ZstdDecompressor().decompressobj()
        try:
            self._content = memoryview(self._frame.decompress(compressed))
        except self._zstandard.ZstdError as error:
            raise EOFError(str(error)) from error
        self._unread = b""
        if self._frame.eof:
            self._unread = self._frame.unused_data
            self._frame = None
