"""Vectors to bytes, in every encoding that a request can choose.

No vector becomes a Python list: orjson writes JSON numbers straight from the numpy row, pybase64 reads
its buffer. One row at a time, so that the loop runs in between while a thread encodes a large response.
"""

import sys
from collections.abc import Sequence
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import orjson
import pybase64

from trio_pool_serve.errors import InvalidRequestError
from trio_pool_serve.types import PooledValue, SparseVector, Vectors

EmbedDtype: TypeAlias = Literal[
    "float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2", "int8", "uint8", "binary", "ubinary"
]
Endianness: TypeAlias = Literal["native", "little", "big"]

Row: TypeAlias = npt.NDArray[np.generic]

SMALL_FLOATS = {"bfloat16": "bfloat16", "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}
"""ml_dtypes' names of floats that numpy itself does not have, each rounded to nearest even."""


def as_dtype(vector: Vectors, dtype: EmbedDtype) -> Row:
    """Return a vector in the type that is sent; several vectors, each by itself.

    int8 is ``round(x · 127 / max|x|)``, each vector by its own maximum: cosine similarity does not care
    about the scale, and none of the range is wasted. uint8 is the same plus 128. ubinary packs one bit
    per dimension, ``x ≥ 0``, most significant bit first; binary is the same less 128, as int8. Raises
    ``InvalidRequestError`` for numbers that a float of 8 bits cannot hold.
    """
    match dtype:
        case "float32":
            return vector
        case "float16":
            return vector.astype(np.float16)
        case "bfloat16" | "fp8_e4m3" | "fp8_e5m2":
            import ml_dtypes  # imported here: 5 ms

            small = vector.astype(getattr(ml_dtypes, SMALL_FLOATS[dtype]))
            if dtype != "bfloat16" and not np.isfinite(small).all():
                raise InvalidRequestError(f"The vectors have numbers too large for {dtype}.", param="embed_dtype")
            return small
        case "int8" | "uint8":
            largest = np.abs(vector).max(axis=-1, keepdims=True)
            scaled = np.rint(vector / np.where(largest, largest, 1) * 127).astype(np.int16)
            return scaled.astype(np.int8) if dtype == "int8" else (scaled + 128).astype(np.uint8)
        case "binary" | "ubinary":
            if vector.shape[-1] % 8:
                raise InvalidRequestError(
                    f"{dtype} needs a multiple of 8 dimensions, not {vector.shape[-1]}.", param="embed_dtype"
                )
            packed = np.packbits(vector >= 0, axis=-1)
            return packed if dtype == "ubinary" else (packed.astype(np.int16) - 128).astype(np.int8)


def row_bytes(vector: Vectors, dtype: EmbedDtype, endianness: Endianness) -> bytes:
    """Return a vector's bytes."""
    row = as_dtype(vector, dtype)
    if endianness not in ("native", sys.byteorder):
        row = row.byteswap()
    return row.tobytes()


def row_base64(vector: Vectors, dtype: EmbedDtype, endianness: Endianness) -> bytes:
    """Return a vector as a JSON string of base64."""
    return b'"' + pybase64.b64encode(row_bytes(vector, dtype, endianness)) + b'"'


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


def sparse_json(vector: SparseVector) -> bytes:
    """Return a sparse vector as a JSON array of ``{"index", "value"}``."""
    pairs = zip(number_items(vector.indices), number_items(vector.values), strict=True)
    return array_json([b'{"index":%b,"value":%b}' % pair for pair in pairs])


def nbytes_of(value: PooledValue) -> int:
    """Return the bytes of a value's arrays."""
    return value.indices.nbytes + value.values.nbytes if isinstance(value, SparseVector) else value.nbytes
