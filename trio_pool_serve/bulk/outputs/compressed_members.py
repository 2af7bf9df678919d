"""Compression whose output can be cut off and continued: one gzip member or zstd frame after the other."""

import zlib
from collections.abc import Callable
from typing import Any

from trio_pool_serve.bulk.bulk_extra import import_extra
from trio_pool_serve.bulk.table_formats import Compression

PIECE_BYTES = 2**17
"""Compressors get pieces of this size, so that what they write does not depend on how rows arrived."""

GZIP_LEVEL = 6
GZIP_WITH_HEADER = 31
"""What zlib calls its window bits. The header has no name and no time."""

ZSTD_LEVEL = 3


class CompressedMembers:
    """Bytes of a file that is compressed in members, or not compressed."""

    def __init__(self, compression: Compression) -> None:
        self._new_compressor = new_compressor(compression)
        self._compressor: Any = None
        self._pending = bytearray()

    def add(self, content: bytes) -> bytes:
        """Take content; return what is to be written to the file already."""
        if self._new_compressor is None:
            return content
        self._compressor = self._compressor or self._new_compressor()
        self._pending += content
        end = len(self._pending) - len(self._pending) % PIECE_BYTES
        pieces = [bytes(self._pending[start : start + PIECE_BYTES]) for start in range(0, end, PIECE_BYTES)]
        del self._pending[:end]
        return b"".join([self._compressor.compress(piece) for piece in pieces])

    def end_member(self) -> bytes:
        """End the member, if there is content since the last one; return what is to be written of it."""
        if self._compressor is None:
            return b""
        written = self._compressor.compress(bytes(self._pending)) + self._compressor.flush()
        self._pending.clear()
        self._compressor = None
        return bytes(written)


def new_compressor(compression: Compression) -> Callable[[], Any] | None:
    """Return a function that returns an object for one member, or None where nothing is compressed."""
    if compression == "gz":
        return lambda: zlib.compressobj(GZIP_LEVEL, zlib.DEFLATED, GZIP_WITH_HEADER)
    if compression == "zst":
        zstandard = import_extra("zstandard", "Writing .zst files")
        return lambda: zstandard.ZstdCompressor(level=ZSTD_LEVEL, write_checksum=True).compressobj()
    return None
