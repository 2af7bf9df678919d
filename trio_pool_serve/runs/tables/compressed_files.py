"""Bytes of a file that is compressed, or not."""

import gzip
import io
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO, cast

from trio_pool_serve.errors import BulkInputError
from trio_pool_serve.runs.tables.table_formats import Compression, import_extra

READ_BYTES = 2**18


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
        pyarrow = import_extra("pyarrow", "Reading .zst files")
        return io.BufferedReader(pyarrow.CompressedInputStream(file, "zstd"), READ_BYTES)
    return file
