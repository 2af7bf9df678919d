"""A tensor within the bytes of a file: of ``torch.save``, which vLLM's clients send, of safetensors or of NumPy.

The files come from clients and are not trusted. Nothing is allocated by the sizes in a header, no code is run, and a
``StoredTensor`` is checked to lie within the bytes that were sent.

A file of ``torch.save`` is a zip of uncompressed members: a pickle that describes the tensor, and its storage, the
numbers. Even with ``weights_only=True``, ``torch.load`` allocates whatever a pickle asks for. Here the pickle may
describe one dense tensor over a storage within the file and nothing else.
"""

import io
import math
import pickle
import pickletools
import threading
import zipfile
from collections.abc import Mapping
from functools import partial
from typing import Any, BinaryIO, Literal, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt
from attrs import frozen

from trio_pool_serve.errors import InvalidRequestError, require

FileBytes: TypeAlias = npt.NDArray[np.uint8]

StoredDtype: TypeAlias = Literal["float16", "bfloat16", "float32"]

ITEM_BYTES: dict[StoredDtype, int] = {"float16": 2, "bfloat16": 2, "float32": 4}

MAX_HEADER = 64 * 1024
"""Bytes. The header of one tensor has one or two hundred."""

MAX_SIZE = 2**63 - 1
"""The maximum of torch and numpy; arithmetic on numbers of thousands of digits would be slow."""

MAX_DIMENSIONS = 64
"""The maximum of numpy; products of thousands of sizes would be slow."""

MAX_PICKLE = 4096
"""Bytes. The pickle of one tensor has about two hundred."""

OPCODES = {
    *("PROTO", "STOP", "GLOBAL", "BINPERSID", "REDUCE", "BINPUT", "BINGET", "BINUNICODE", "NEWTRUE", "NEWFALSE"),
    *("BININT", "BININT1", "BININT2", "LONG1", "MARK", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "EMPTY_TUPLE"),
}
"""The opcodes in the pickle of a tensor. Others could allocate gigabytes, as LONG_BINPUT, or change objects."""

ONE_HEADER = threading.Lock()
"""numpy parses headers with ``ast``, whose state all threads of Python 3.11 share: if garbage collection switches
threads during parsing, a valid header raises SystemError (https://github.com/python/cpython/issues/106905)."""

SAFETENSORS_DTYPES: dict[str, StoredDtype] = {"F16": "float16", "BF16": "bfloat16", "F32": "float32"}


def refused(message: str) -> InvalidRequestError:
    """Return the error for a tensor that is not accepted."""
    return InvalidRequestError(message, field="prompts")


require_tensor = partial(require, error=refused)
"""Raises such an error with a message if something is not right."""


@frozen(eq=False)
class StoredTensor:
    """A dense tensor of little-endian numbers within ``buffer`` (uint8), from byte ``start``.

    ``strides`` are in bytes; without them, the numbers are contiguous. A copy takes at most the bytes of the buffer.
    Raises ``InvalidRequestError`` on construction if the values contradict each other.
    """

    buffer: FileBytes
    dtype: StoredDtype
    shape: tuple[int, ...]
    start: int
    is_column_major: bool = False
    strides: tuple[int, ...] | None = None

    def __attrs_post_init__(self) -> None:
        # A bool is an int as well, and numpy accepts it as a size.
        sizes = (*self.shape, *(self.strides or ()), self.start)
        require_tensor(
            all(type(size) is int and 0 <= size <= MAX_SIZE for size in sizes),
            "The tensor's sizes and offsets are not valid.",
        )
        end = self.start + self.nbytes
        if self.strides is not None and self.nbytes:
            last = sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))
            end = max(end, self.start + last + ITEM_BYTES[self.dtype])
        require_tensor(
            end <= len(self.buffer),
            "The tensor is truncated or expanded: its header declares more numbers than there are.",
        )

    @property
    def nbytes(self) -> int:
        """Bytes of the numbers. Raises ``InvalidRequestError`` for more than ``MAX_DIMENSIONS``."""
        require_tensor(
            len(self.shape) <= MAX_DIMENSIONS,
            f"The tensor has {len(self.shape)} dimensions; it must have 2: tokens and hidden size.",
        )
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]

    def rows(self, first: int, last: int) -> npt.NDArray[Any]:
        """Return a view of rows of a matrix, shape (last − first, columns); bfloat16 as uint16."""
        kind = {"float16": "<f2", "bfloat16": "<u2", "float32": "<f4"}[self.dtype]
        return np.ndarray(
            self.shape, kind, self.buffer, self.start, self.strides, "F" if self.is_column_major else "C"
        )[first:last]


def read_tensor(buffer: FileBytes) -> StoredTensor:
    """Detect the format from the first bytes and return the tensor. Raises ``InvalidRequestError``."""
    magic = buffer[:9].tobytes()
    if magic.startswith(b"\x93NUMPY"):
        return read_npy(buffer)
    if magic[8:] == b"{":
        return read_safetensors(buffer)
    if magic.startswith(b"PK\3\4"):
        return read_torch_archive(buffer)
    require_tensor(
        not magic.startswith(b"\x80"),
        "The old format of torch.save is not accepted: leave out _use_new_zipfile_serialization=False, or send "
        "safetensors or .npy.",
    )
    raise refused("The tensor is in an unknown format: files of torch.save, safetensors and .npy are accepted.")


def read_npy(buffer: FileBytes) -> StoredTensor:
    """Return the array of an ``.npy`` file. Raises ``InvalidRequestError``."""
    stream = io.BytesIO(buffer[:MAX_HEADER].tobytes())
    try:
        read_header: Any = {
            (1, 0): np.lib.format.read_array_header_1_0,
            (2, 0): np.lib.format.read_array_header_2_0,
        }[np.lib.format.read_magic(stream)]
        with ONE_HEADER:
            shape, is_column_major, dtype = read_header(stream)
    except KeyError as error:
        raise refused("Of .npy files, versions 1.0 and 2.0 are read.") from error
    except Exception as error:  # numpy raises various errors for invalid headers
        raise refused("The header of the .npy file cannot be read.") from error
    require_tensor(
        not dtype.hasobject and dtype.newbyteorder("<") == dtype and dtype.name in ("float16", "float32"),
        f"The .npy file holds {dtype.str}; it must be little-endian float16 or float32.",
    )
    return StoredTensor(buffer, dtype.name, shape, stream.tell(), is_column_major)


@frozen(kw_only=True)
class TensorEntry:
    """One tensor: its type in safetensors' spelling, and the first byte and the end of its numbers after the header."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]

    def fits(self, item_bytes: int) -> bool:
        """Return whether the numbers of the shape, of that size each, are as many bytes as there are."""
        begin, end = self.data_offsets
        return (
            len(self.shape) <= MAX_DIMENSIONS
            and min((*self.shape, begin)) >= 0
            and end - begin == math.prod(self.shape) * item_bytes
        )


ENTRIES = msgspec.json.Decoder(TensorEntry)
"""Made here, before there are threads: msgspec may crash if it meets a class for the first time in two at once."""


def read_header(file: BinaryIO, max_bytes: int) -> tuple[dict[str, TensorEntry], int]:
    """Return the tensors by name, and the place in the file where their numbers begin.

    Raises ``ValueError`` for a header that is damaged or has more than ``max_bytes``, and ``OSError``.
    """
    length = int.from_bytes(file.read(8), "little")
    header = file.read(min(length, max_bytes))
    if len(header) != length or length < 2:
        raise ValueError(f"its header claims {length} bytes; at most {max_bytes} are read")
    try:
        entries = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
        entries.pop("__metadata__", None)
        return {name: ENTRIES.decode(entry) for name, entry in entries.items()}, 8 + length
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError("its header cannot be read") from error


def read_safetensors(buffer: FileBytes) -> StoredTensor:
    """Return the one tensor of a ``safetensors`` file. Raises ``InvalidRequestError``."""
    try:
        entries, numbers = read_header(io.BytesIO(buffer[: MAX_HEADER + 8].tobytes()), MAX_HEADER)
    except ValueError as error:
        raise refused(f"The safetensors file cannot be read: {error}.") from error
    require_tensor(len(entries) == 1, f"The safetensors file holds {len(entries)} tensors; it must hold exactly one.")
    (entry,) = entries.values()
    require_tensor(
        entry.dtype in SAFETENSORS_DTYPES, f"The tensor's type is {entry.dtype}; it must be F16, BF16 or F32."
    )
    dtype = SAFETENSORS_DTYPES[entry.dtype]
    require_tensor(entry.fits(ITEM_BYTES[dtype]), "The safetensors header's shape and offsets contradict each other.")
    return StoredTensor(buffer, dtype, entry.shape, numbers + entry.data_offsets[0])


def _unsupported(reason: str) -> InvalidRequestError:
    return refused(
        "A file of torch.save must hold one dense tensor of float16, bfloat16 or float32, not in a list or dict; "
        f"{reason}."
    )


def _rebuild_tensor(
    storage: Any, first: int, shape: Any, strides: Any, _requires_grad: Any, _hooks: Any, *metadata: Any
) -> StoredTensor:
    are_whole = all(type(number) is int for number in (first, *strides))
    if not isinstance(storage, StoredTensor) or not are_whole or any(metadata):
        raise _unsupported("it is not a plain tensor")
    item, numbers = ITEM_BYTES[storage.dtype], storage.buffer[: storage.nbytes]
    return StoredTensor(
        numbers, storage.dtype, tuple(shape), first * item, strides=tuple(stride * item for stride in strides)
    )


NAMES: Mapping[tuple[str, str], Any] = {
    ("torch._utils", "_rebuild_tensor_v2"): _rebuild_tensor,
    ("torch._utils", "_rebuild_parameter"): lambda tensor, _requires_grad, _hooks: tensor,
    ("collections", "OrderedDict"): lambda: None,  # the hooks of a tensor, which are never saved
    ("torch", "HalfStorage"): "float16",
    ("torch", "BFloat16Storage"): "bfloat16",
    ("torch", "FloatStorage"): "float32",
}
"""The names that the pickle may refer to. Calling them has no effect outside the unpickler."""


class _TensorUnpickler(pickle.Unpickler):
    def __init__(self, pickled: bytes, members: Mapping[str, FileBytes]) -> None:
        super().__init__(io.BytesIO(pickled))
        self._members = members

    def find_class(self, module: str, name: str) -> Any:
        require((module, name) in NAMES, f"it refers to {f'{module}.{name}'[:100]!r}", _unsupported)
        return NAMES[module, name]

    def persistent_load(self, reference: Any) -> StoredTensor:
        """Return a storage: a tensor with one dimension."""
        _kind, dtype, name, _device, count = reference
        # Types first: a tuple of tuples can take forever to be hashed.
        if not isinstance(dtype, str) or dtype not in ITEM_BYTES or not isinstance(name, str):
            raise _unsupported("it refers to an object that is not a storage")
        return StoredTensor(self._members[f"data/{name}"], dtype, (count,), 0)


def read_torch_archive(buffer: FileBytes) -> StoredTensor:
    """Return the tensor of a file that ``torch.save`` wrote. Raises ``InvalidRequestError``."""
    members = _members(buffer)
    pickled, order = members.get("data.pkl", buffer[:0]), members.get("byteorder")
    require(
        0 < len(pickled) <= MAX_PICKLE,
        f"its data.pkl has {len(pickled)} bytes, and 1 to {MAX_PICKLE} are read",
        _unsupported,
    )
    require_tensor(
        order is None or order[:7].tobytes() == b"little",
        "The tensor was saved on a big-endian machine; its numbers must be little-endian.",
    )
    try:
        return _unpickled(pickled.tobytes(), members)
    except InvalidRequestError:
        raise
    except Exception as error:  # broken pickles raise various errors
        raise _unsupported("its pickle is broken, or its numbers are missing") from error


def _unpickled(pickled: bytes, members: Mapping[str, FileBytes]) -> StoredTensor:
    others = {opcode.name for opcode, _, _ in pickletools.genops(pickled)} - OPCODES
    if others:
        raise _unsupported(f"its pickle has the opcode {min(others)}")
    tensor = _TensorUnpickler(pickled, members).load()
    if not isinstance(tensor, StoredTensor):
        raise _unsupported(f"it is a {type(tensor).__name__}")
    return tensor


class _DirectoryReader:
    """A buffer for ``zipfile``, which reads only an archive's end and its directory: up to ``MAX_HEADER`` bytes."""

    def __init__(self, buffer: FileBytes) -> None:
        self.buffer, self.place = buffer, 0

    def seek(self, offset: int, whence: int = 0) -> int:
        self.place = max(0, (0, self.place, len(self.buffer))[whence] + offset)
        return self.place

    def tell(self) -> int:
        return self.place

    def read(self, size: int = MAX_HEADER) -> bytes:
        piece = self.buffer[self.place :][: min(size, MAX_HEADER)]
        self.place += len(piece)
        return piece.tobytes()


def _members(buffer: FileBytes) -> Mapping[str, FileBytes]:
    """Return the contents of an archive's members by the name in its folder: views of the buffer."""
    try:
        with zipfile.ZipFile(_DirectoryReader(buffer)) as archive:
            infos = archive.infolist()
        contents = [_content(buffer, info.header_offset, info.compress_size) for info in infos]
    except Exception as error:  # zipfile raises various errors for broken directories
        raise refused("The tensor is truncated: the directory of its zip archive cannot be read.") from error
    require_tensor(
        not any(info.compress_type or info.flag_bits & 1 or info.compress_size != info.file_size for info in infos),
        "The zip archive has members that are compressed or encrypted; torch.save writes none.",
    )
    members = {info.filename.partition("/")[2]: content for info, content in zip(infos, contents, strict=True)}
    require_tensor(
        len(members) == len(infos) and sum(map(len, contents)) <= len(buffer),
        "The zip archive has members that overlap or have the same name; torch.save writes none.",
    )
    return members


def _content(buffer: FileBytes, offset: int, size: int) -> FileBytes:
    """Return the content of a member, which follows its local header. Raises ``ValueError``."""
    begin = offset + 30 + sum(buffer[offset + 26 : offset + 30].view("<u2").tolist())  # after its name and extra field
    if offset < 0 or buffer[offset : offset + 4].tobytes() != b"PK\3\4" or begin + size > len(buffer):
        raise ValueError("no member of the archive is there")
    return buffer[begin : begin + size]
