"""Tensors within a file's bytes, located and checked without copying their numbers.

Headers come from clients and are not trusted: nothing is allocated by the sizes in a header, and a ``StoredTensor`` is
checked to lie within the bytes that were sent.
"""

import io
import math
import threading
from typing import Any, Literal, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt
from attrs import frozen

from trio_pool_serve.errors import InvalidRequestError

StoredDtype: TypeAlias = Literal["float16", "bfloat16", "float32"]

ITEM_BYTES: dict[StoredDtype, int] = {"float16": 2, "bfloat16": 2, "float32": 4}

MAX_HEADER = 64 * 1024
"""Bytes. The header of one tensor has one or two hundred."""

MAX_SIZE = 2**63 - 1
"""The maximum of torch and numpy; arithmetic on numbers of thousands of digits would be slow."""

MAX_DIMENSIONS = 64
"""The maximum of numpy; products of thousands of sizes would be slow."""

ONE_HEADER = threading.Lock()
"""numpy parses headers with ``ast``, whose state all threads of Python 3.11 share: if garbage collection switches
threads during parsing, a valid header raises SystemError (https://github.com/python/cpython/issues/106905)."""

SAFETENSORS_DTYPES: dict[str, StoredDtype] = {"F16": "float16", "BF16": "bfloat16", "F32": "float32"}


def refused(message: str) -> InvalidRequestError:
    """Return the error for a tensor that is not accepted."""
    return InvalidRequestError(message, field="prompts")


@frozen(eq=False)
class StoredTensor:
    """A dense tensor of little-endian numbers within ``buffer`` (uint8), from byte ``start``.

    Raises ``InvalidRequestError`` on construction if the values contradict each other.
    """

    buffer: npt.NDArray[np.uint8]
    dtype: StoredDtype
    shape: tuple[int, ...]
    start: int
    is_column_major: bool = False

    def __attrs_post_init__(self) -> None:
        # A bool is an int as well, and numpy accepts it as a size.
        if not all(type(size) is int and 0 <= size <= MAX_SIZE for size in (*self.shape, self.start)):
            raise refused("The tensor's sizes and offsets are not valid.")
        if self.start + self.nbytes > len(self.buffer):
            raise refused("The tensor is truncated: its header declares more numbers than there are.")

    @property
    def nbytes(self) -> int:
        """Bytes of the numbers."""
        return count_of(self.shape) * ITEM_BYTES[self.dtype]

    def rows(self, first: int, last: int) -> npt.NDArray[Any]:
        """Return a view of rows of a matrix, shape (last − first, columns); bfloat16 as uint16."""
        kind = {"float16": "<f2", "bfloat16": "<u2", "float32": "<f4"}[self.dtype]
        held = np.frombuffer(self.buffer, dtype=kind, count=count_of(self.shape), offset=self.start)
        return held.reshape(self.shape, order="F" if self.is_column_major else "C")[first:last]


def count_of(shape: tuple[int, ...]) -> int:
    """Return how many numbers a shape has. Raises ``InvalidRequestError`` above ``MAX_DIMENSIONS``."""
    if len(shape) > MAX_DIMENSIONS:
        raise refused(f"The tensor has {len(shape)} dimensions; it must have 2: tokens and hidden size.")
    return math.prod(shape)


def read_npy(buffer: npt.NDArray[np.uint8]) -> StoredTensor:
    """Return the array of an ``.npy`` file. Raises ``InvalidRequestError``."""
    stream = io.BytesIO(buffer[:MAX_HEADER].tobytes())
    try:
        version = np.lib.format.read_magic(stream)
        read_header: Any = {
            (1, 0): np.lib.format.read_array_header_1_0,
            (2, 0): np.lib.format.read_array_header_2_0,
        }[version]
        with ONE_HEADER:
            shape, is_column_major, dtype = read_header(stream)
    except KeyError as error:
        raise refused("Of .npy files, versions 1.0 and 2.0 are read.") from error
    except Exception as error:  # numpy raises various errors for invalid headers
        raise refused("The header of the .npy file cannot be read.") from error
    if dtype.hasobject or dtype.newbyteorder("<") != dtype or dtype.name not in ("float16", "float32"):
        raise refused(f"The .npy file holds {dtype.str}; it must be little-endian float16 or float32.")
    return StoredTensor(buffer, dtype.name, shape, stream.tell(), is_column_major)


@frozen(kw_only=True)
class _SafetensorsEntry:
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


ENTRIES = msgspec.json.Decoder(_SafetensorsEntry)
"""Made here, before there are threads: msgspec may crash if it meets a class for the first time in two at once."""


def read_safetensors(buffer: npt.NDArray[np.uint8]) -> StoredTensor:
    """Return the one tensor of a ``safetensors`` file. Raises ``InvalidRequestError``."""
    length = int.from_bytes(buffer[:8].tobytes(), "little")
    if not 2 <= length <= min(MAX_HEADER, len(buffer) - 8):
        raise refused(f"The safetensors header claims {length} bytes; at most {MAX_HEADER} are read.")
    try:
        header = msgspec.json.decode(buffer[8 : 8 + length].tobytes(), type=dict[str, msgspec.Raw])
        header.pop("__metadata__", None)
        entries = [ENTRIES.decode(entry) for entry in header.values()]
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise refused("The safetensors header cannot be read.") from error
    if len(entries) != 1:
        raise refused(f"The safetensors file holds {len(entries)} tensors; it must hold exactly one.")
    (entry,) = entries
    if entry.dtype not in SAFETENSORS_DTYPES:
        raise refused(f"The tensor's type is {entry.dtype}; it must be F16, BF16 or F32.")
    dtype, (begin, end) = SAFETENSORS_DTYPES[entry.dtype], entry.data_offsets
    if any(size < 0 for size in entry.shape) or end - begin != count_of(entry.shape) * ITEM_BYTES[dtype]:
        raise refused("The safetensors header's shape and offsets contradict each other.")
    return StoredTensor(buffer, dtype, entry.shape, 8 + length + begin)
