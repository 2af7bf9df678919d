"""Vectors to bytes, in every encoding that a request can choose.

No vector becomes a Python list: orjson writes JSON numbers straight from the numpy row, pybase64 reads
its buffer. One row at a time, so that the loop runs in between while a thread encodes a large response.
"""

import sys
from collections.abc import Sequence
from typing import Literal, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt
import orjson
import pybase64

from trio_pool_serve.errors import require_request
from trio_pool_serve.types import PooledValue, SparseVector, Vectors

EmbedDtype: TypeAlias = Literal[
    "float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2", "int8", "uint8", "binary", "ubinary"
]
Endianness: TypeAlias = Literal["native", "little", "big"]

EncodingFormat: TypeAlias = Literal["float", "base64", "bytes", "bytes_only"]

MAX_METADATA_ROWS = 64
"""Maximum number of vectors in the ``metadata`` header, where each takes more than 64 bytes."""

Row: TypeAlias = npt.NDArray[np.generic]

SMALL_FLOATS = {"bfloat16": "bfloat16", "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}
"""ml_dtypes' names of floats that numpy itself does not have, each rounded to nearest even."""


def as_dtype(vector: Vectors, dtype: EmbedDtype) -> Row:
    """Return a vector in the type that is sent; several vectors, each by itself.

    int8 is ``round(x · 127 / max|x|)``, each vector by its own maximum: cosine similarity does not care
    about the scale, and none of the range is wasted. uint8 is the same plus 128. ubinary packs one bit
    per dimension, ``x ≥ 0``, most significant bit first; binary is the same less 128, as int8. Raises
    ``InvalidRequestError`` for numbers that a float of 8 or 16 bits cannot hold.
    """
    match dtype:
        case "float32":
            return vector
        case "float16" | "bfloat16" | "fp8_e4m3" | "fp8_e5m2":
            import ml_dtypes  # imported here: 5 ms

            with np.errstate(over="ignore"):
                small = vector.astype(np.float16 if dtype == "float16" else getattr(ml_dtypes, SMALL_FLOATS[dtype]))
            require_request(
                np.isfinite(small).all(), f"The vectors have numbers too large for {dtype}.", param="embed_dtype"
            )
            return small
        case "int8" | "uint8":
            largest = np.abs(vector).max(axis=-1, keepdims=True)
            scaled = np.rint(vector / np.where(largest, largest, 1) * 127).astype(np.int16)
            return scaled.astype(np.int8) if dtype == "int8" else (scaled + 128).astype(np.uint8)
        case "binary" | "ubinary":
            require_request(
                vector.shape[-1] % 8 == 0,
                f"{dtype} needs a multiple of 8 dimensions, not {vector.shape[-1]}.",
                param="embed_dtype",
            )
            packed = np.packbits(vector >= 0, axis=-1)
            return packed if dtype == "ubinary" else (packed.astype(np.int16) - 128).astype(np.int8)


def row_json(vector: Vectors, dtype: EmbedDtype) -> bytes:
    """Return a vector as a JSON array of numbers: the shortest that read back as the same float32."""
    row = as_dtype(vector, dtype)
    if dtype in SMALL_FLOATS:
        row = row.astype(np.float32)
    return orjson.dumps(np.ascontiguousarray(row), option=orjson.OPT_SERIALIZE_NUMPY)


def number_items(numbers: Row) -> list[bytes]:
    """Return each number of an array, shape (n,), as JSON."""
    items = orjson.dumps(np.ascontiguousarray(numbers), option=orjson.OPT_SERIALIZE_NUMPY)[1:-1]
    return items.split(b",") if items else []


def array_json(items: Sequence[bytes]) -> bytes:
    """Return a JSON array of items that are JSON already."""
    return b"[" + b",".join(items) + b"]"


def nbytes_of(value: PooledValue) -> int:
    """Return the bytes of a value's arrays."""
    return value.indices.nbytes + value.values.nbytes if isinstance(value, SparseVector) else value.nbytes


class VectorEncoding(msgspec.Struct, frozen=True):
    """How vectors are encoded in a response.

    ``dtype_param`` is the field of the request that chose ``dtype``, for errors.
    """

    format: EncodingFormat = "float"
    dtype: EmbedDtype = "float32"
    endianness: Endianness | None = None
    dtype_param: str = "embed_dtype"

    def refuse_unencodable(self, *, rows: int, dimensions: int) -> None:
        """Raise ``InvalidRequestError`` for vectors that cannot be encoded so, before they are computed."""
        require_request(
            self.dtype not in ("binary", "ubinary") or dimensions % 8 == 0,
            f"{self.dtype} needs a multiple of 8 dimensions, not {dimensions}.",
            param=self.dtype_param,
        )
        require_request(
            self.format != "bytes" or rows <= MAX_METADATA_ROWS,
            f"must be 'bytes_only' for {rows} vectors: a header cannot hold their metadata.",
            at="encoding_format",
        )

    @property
    def byte_order(self) -> Endianness:
        """The byte order: the request's, by default the machine's own, but little-endian in base64."""
        return self.endianness or ("little" if self.format == "base64" else "native")

    def json(self, value: PooledValue) -> msgspec.Raw:
        """Return a value as JSON: an array of numbers, or of ``{"index", "value"}``; or a string of base64."""
        if isinstance(value, SparseVector):
            pairs = zip(number_items(value.indices), number_items(value.values), strict=True)
            return msgspec.Raw(array_json([b'{"index":%b,"value":%b}' % pair for pair in pairs]))
        if self.format == "base64":
            return msgspec.Raw(b'"' + pybase64.b64encode(self.bytes(value)) + b'"')
        return msgspec.Raw(row_json(value, self.dtype))

    def bytes(self, vector: Vectors) -> bytes:
        """Return a vector's bytes."""
        row = as_dtype(vector, self.dtype)
        return (row if self.byte_order in ("native", sys.byteorder) else row.byteswap()).tobytes()
