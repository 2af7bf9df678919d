"""Reads one tensor from a ``torch.save`` file without torch.

The file is a zip of uncompressed members: a pickle that describes the tensor, and the numbers. With
``weights_only=True``, ``torch.load`` runs no code, but performs everything else that a pickle requests: it allocates,
densifies, enlarges storages that are too small, moves tensors to devices. Here the pickle must describe a dense tensor
over one storage and nothing else; the numbers are not copied.
"""

import io
import pickle
import pickletools
import struct
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from attrs import frozen

from trio_pool_serve.errors import InvalidRequestError
from trio_pool_serve.rendering.embeds.stored_tensor import ITEM_BYTES, StoredDtype, StoredTensor, refused

MAX_DIRECTORY = 16 * 1024
"""Bytes of the zip's directory. The file of one tensor has about seven members."""

MAX_PICKLE = 16 * 1024
"""Bytes of the pickle. That of one tensor has about two hundred."""

MAX_MEMO = 1024
"""Maximum index of the pickle's memo: the unpickler allocates as many entries as the index."""

STORAGES: Mapping[tuple[str, str], StoredDtype] = {
    ("torch", "HalfStorage"): "float16",
    ("torch", "BFloat16Storage"): "bfloat16",
    ("torch", "FloatStorage"): "float32",
}

OPCODES = frozenset(
    {
        *("PROTO", "FRAME", "STOP", "GLOBAL", "STACK_GLOBAL", "BINPERSID", "REDUCE"),
        *("BINUNICODE", "SHORT_BINUNICODE", "BININT", "BININT1", "BININT2", "LONG1", "NEWTRUE", "NEWFALSE", "NONE"),
        *("MARK", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "EMPTY_TUPLE"),
        *("BINPUT", "LONG_BINPUT", "MEMOIZE", "BINGET", "LONG_BINGET"),
    }
)
"""The opcodes in the pickle of a tensor."""


@frozen(eq=False)
class _Storage:
    dtype: StoredDtype
    name: str


@frozen(eq=False)
class _TensorDescription:
    storage: _Storage
    first: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class _StorageClass:
    """Stands for a storage class that the pickle names; it cannot be called."""

    def __init__(self, dtype: StoredDtype) -> None:
        self.dtype = dtype


def _rebuild_tensor(*args: Any) -> _TensorDescription:
    storage, first, shape, strides, _requires_grad, _hooks, *metadata = args
    numbers = (first, *shape, *strides)
    if not isinstance(storage, _Storage) or not all(type(number) is int for number in numbers) or any(metadata):
        raise pickle.UnpicklingError("it is not a plain tensor")
    return _TensorDescription(storage, first, tuple(shape), tuple(strides))


class _TensorUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _rebuild_tensor
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict  # of the tensor's hooks, always empty
        if (module, name) in STORAGES:
            return _StorageClass(STORAGES[module, name])
        raise pickle.UnpicklingError(f"it refers to {module}.{name}")

    def persistent_load(self, reference: Any) -> _Storage:
        kind, dtype, name, _device, _numbers = reference
        if kind != "storage" or not isinstance(dtype, _StorageClass) or not isinstance(name, str):
            raise pickle.UnpicklingError("it refers to an object that is not a storage")
        return _Storage(dtype.dtype, name)


def read_torch_archive(buffer: npt.NDArray[np.uint8]) -> StoredTensor:
    """Return the tensor of a file that ``torch.save`` wrote. Raises ``InvalidRequestError``."""
    members = _members(buffer)
    pickles = [name for name in members if name.endswith("/data.pkl")]
    if len(pickles) != 1:
        raise refused("The zip was not written by torch.save: it has no data.pkl.")
    folder = pickles[0].removesuffix("data.pkl")
    begin, end = members[pickles[0]]
    if end - begin > MAX_PICKLE:
        raise refused(f"The tensor's pickle has {end - begin} bytes; at most {MAX_PICKLE} are read.")
    described = _unpickle(buffer[begin:end].tobytes())
    order = members.get(f"{folder}byteorder")
    if order is not None and buffer[order[0] : order[1]].tobytes() != b"little":
        raise refused("The tensor was saved on a big-endian machine.")
    if f"{folder}data/{described.storage.name}" not in members:
        raise refused("The tensor is truncated: its numbers are missing.")
    begin, end = members[f"{folder}data/{described.storage.name}"]
    dtype = described.storage.dtype
    numbers = (end - begin) // ITEM_BYTES[dtype]
    return StoredTensor(buffer, dtype, described.shape, described.strides, begin, numbers, described.first)


def _unpickle(pickled: bytes) -> _TensorDescription:
    try:
        _require_tensor_opcodes(pickled)
        described = _TensorUnpickler(io.BytesIO(pickled)).load()
    except pickle.UnpicklingError as error:
        raise _unsupported(str(error)) from error
    except Exception as error:  # invalid pickles make the unpickler raise various errors
        raise _unsupported("its pickle is broken") from error
    if not isinstance(described, _TensorDescription):
        raise _unsupported(f"it is a {type(described).__name__}")
    return described


def _require_tensor_opcodes(pickled: bytes) -> None:
    for opcode, argument, _ in pickletools.genops(pickled):
        if opcode.name not in OPCODES:
            raise pickle.UnpicklingError(f"its pickle has a {opcode.name}")
        if opcode.name == "LONG_BINPUT" and int(argument or 0) > MAX_MEMO:
            raise pickle.UnpicklingError(f"its pickle has a memo of more than {MAX_MEMO} entries")


def _unsupported(reason: str) -> InvalidRequestError:
    return refused(
        "A torch.save file must hold one dense tensor of float16, bfloat16 or float32, no parameter, list, dict or "
        f"sparse tensor; {reason}."
    )


def _members(buffer: npt.NDArray[np.uint8]) -> dict[str, tuple[int, int]]:
    """Return the byte range of each member: its first byte and the one after its last."""
    try:
        directory, entries = _directory(buffer)
        members = {}
        for _ in range(entries):
            signature, flags, method, packed, size, name_length, extra_length, comment_length, offset = struct.unpack(
                "<4s4x2H8x2L3H8xL", directory[:46]
            )
            name = directory[46 : 46 + name_length].decode()
            if signature != b"PK\1\2" or flags & 1 or method != 0 or packed != size:
                raise refused("The zip has members that are compressed or encrypted; torch.save writes none.")
            members[name] = _content_range(buffer, offset, size)
            directory = directory[46 + name_length + extra_length + comment_length :]
    except (struct.error, UnicodeDecodeError) as error:
        raise refused("The tensor is truncated: the zip's directory cannot be read.") from error
    return members


def _directory(buffer: npt.NDArray[np.uint8]) -> tuple[bytes, int]:
    """Return a zip's directory and its number of entries. torch writes no comment after it."""
    signature, entries, size, offset = struct.unpack("<4s6xH2L2x", buffer[-22:].tobytes())
    if signature != b"PK\5\6":
        raise refused("The tensor is truncated: the zip has no end.")
    if size > MAX_DIRECTORY or offset + size > len(buffer):
        raise refused(f"The zip's directory claims {size} bytes; at most {MAX_DIRECTORY} are read.")
    return buffer[offset : offset + size].tobytes(), entries


def _content_range(buffer: npt.NDArray[np.uint8], offset: int, size: int) -> tuple[int, int]:
    """Return the byte range of a member's content, after its local header."""
    signature, name_length, extra_length = struct.unpack("<4s22x2H", buffer[offset : offset + 30].tobytes())
    begin = offset + 30 + name_length + extra_length
    if signature != b"PK\3\4" or begin + size > len(buffer):
        raise refused("The tensor is truncated: the zip's members are not where its directory says.")
    return begin, begin + size
