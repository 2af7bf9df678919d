"""Decodes clients' token embeddings: base64 of a file with one matrix.

The file's header is not trusted: nothing is allocated by the sizes in it, and a ``StoredTensor`` is checked to lie
within the bytes that were sent. Long operations release the interpreter lock or run in pieces, so other requests
proceed while a hundred megabytes are decoded.
"""

import io
import math
import threading
from typing import Any, Literal, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt
import pybase64
from attrs import frozen

from trio_pool_serve.errors import ContextLengthError, EmptyInputError, InvalidRequestError
from trio_pool_serve.prompts import EmbedsPrompt, RenderingParams
from trio_pool_serve.types import RenderedPrompt

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


DECODE_CHUNK_CHARACTERS = 256 * 1024
"""Characters of base64 decoded per call; a multiple of four."""

COPY_CHUNK_NUMBERS = 2**18
"""Numbers copied per call."""

EXPONENTS: dict[StoredDtype, int] = {"float16": 0x7C00, "bfloat16": 0x7F80, "float32": 0x7F800000}
"""Exponent bits: all are set in infinities and NaN."""

MAX_FILE_OVERHEAD = 64 * 1024
"""Maximum bytes of a file in addition to its numbers."""


@frozen
class EmbedsFormat:
    """The matrices that a model accepts: ``width`` columns, and up to ``max_rows`` rows, the maximum of tokens."""

    width: int
    max_rows: int

    @property
    def max_bytes(self) -> int:
        """Maximum size of a file: the longest matrix in float32, and its header."""
        return self.max_rows * self.width * 4 + MAX_FILE_OVERHEAD

    def estimated_tokens(self, prompt: EmbedsPrompt) -> int:
        """Return an upper bound of the rows, for admission: as many as fit the payload and the model."""
        return min(self.max_rows, len(prompt.payload) * 3 // 4 // (min(ITEM_BYTES.values()) * self.width))

    def render(self, prompt: EmbedsPrompt, params: RenderingParams) -> RenderedPrompt:
        """Return the model input: embeds of shape (tokens, width), truncated as tokens are.

        Raises ``ContextLengthError`` for too many rows and ``InvalidRequestError`` for anything but base64 of one
        finite float matrix of the model's width.
        """
        tensor = read_tensor(self._decode(prompt.payload))
        if len(tensor.shape) != 2:
            raise refused(f"The tensor has {len(tensor.shape)} dimensions; it must have 2: tokens and hidden size.")
        rows, width = tensor.shape
        if width != self.width:
            raise refused(f"The tensor is {width} wide, but this model's token embeddings are {self.width} wide.")
        if rows == 0:
            raise EmptyInputError("The tensor has no rows.", field="prompts")
        keep = rows if params.truncate_to is None else min(rows, params.truncate_to)
        if tensor.nbytes > self.max_bytes or keep > self.max_rows:
            raise self._too_long(f"{rows} rows")
        first = rows - keep if params.truncation_side == "left" else 0
        return RenderedPrompt(np.zeros(keep, dtype=np.int32), embeds=_finite_rows(tensor, first, first + keep))

    def _decode(self, payload: bytes | memoryview) -> npt.NDArray[np.uint8]:
        """Return the bytes (uint8, one dimension) of strict base64."""
        if not len(payload):
            raise EmptyInputError("There is no tensor.", field="prompts")
        size = max(0, len(payload) // 4 * 3 - bytes(payload[-2:]).count(b"="))
        if size > self.max_bytes:
            raise self._too_long(f"{size} bytes")
        # numpy uses huge pages: freeing them takes a tenth of the time of bytes.
        decoded = np.empty(size, dtype=np.uint8)
        place = 0
        with memoryview(payload) as characters, decoded.data as out:
            for begin in range(0, len(characters), DECODE_CHUNK_CHARACTERS):
                try:
                    piece = pybase64.b64decode(characters[begin : begin + DECODE_CHUNK_CHARACTERS], validate=True)
                    out[place : place + len(piece)] = piece
                except ValueError as error:  # padding before the end yields too few bytes, or too many here
                    raise refused("The tensor is not valid base64.") from error
                place += len(piece)
        if place != size:
            raise refused("The tensor is not valid base64.")
        return decoded

    def _too_long(self, length: str) -> ContextLengthError:
        return ContextLengthError(
            f"A tensor has {length}, but this model takes at most {self.max_rows} rows of {self.width} numbers.",
            field="prompts",
        )


def read_tensor(buffer: npt.NDArray[np.uint8]) -> StoredTensor:
    """Detect the format from the first bytes and return the tensor. Raises ``InvalidRequestError``."""
    magic = buffer[:9].tobytes()
    if magic.startswith(b"\x93NUMPY"):
        return read_npy(buffer)
    if magic[8:] == b"{":
        return read_safetensors(buffer)
    if magic.startswith((b"PK\3\4", b"\x80")):
        raise refused("Files of torch.save are not accepted: send safetensors or .npy.")
    raise refused("The tensor is in an unknown format: safetensors and .npy are accepted.")


def _finite_rows(tensor: StoredTensor, first: int, last: int) -> npt.NDArray[Any]:
    """Return a copy of rows in their stored dtype: float16, float32, or bfloat16 as uint16.

    The forward pass converts them, so prompts that wait in the queue take no more memory than necessary.
    """
    width, exponent = tensor.shape[1], EXPONENTS[tensor.dtype]
    rows = np.empty((last - first, width), dtype=tensor.rows(first, first).dtype)
    bits = rows.view(f"<u{rows.itemsize}")
    step = max(1, COPY_CHUNK_NUMBERS // width)
    for begin in range(0, last - first, step):
        end = min(begin + step, last - first)
        rows[begin:end] = tensor.rows(first + begin, first + end)
        if ((bits[begin:end] & exponent) == exponent).any():
            raise refused("The tensor has numbers that are not finite.")
    return rows
