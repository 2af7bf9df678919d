"""What ``torch.save`` writes for one tensor, read without torch.

The file is a zip of uncompressed members: a pickle that describes the tensor, and the numbers. ``torch.load`` runs
no code with ``weights_only=True``, but it does all else that the pickle asks for: it allocates, densifies, enlarges
storages that are too small, moves tensors to devices. Here the pickle may name a dense tensor over one storage, and
nothing else at all; the numbers stay where they are.
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
"""Bytes of the zip's directory: one tensor has about seven members."""

MAX_PICKLE = 16 * 1024
"""Bytes of the pickle: one tensor has about two hundred."""

MAX_MEMO = 1024
"""Things that the pickle refers to again. An index is made room for up to, whatever it is."""

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
"""All that the pickle of a tensor consists of."""


@frozen(eq=False)
class _Storage:
    dtype: StoredDtype
    name: str


@frozen(eq=False)
class _Described:
    storage: _Storage
    first: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class _DtypeOf:
    """A storage's class, as the pickle names it: it can only be told apart, not called."""

    def __init__(self, dtype: StoredDtype) -> None:
        self.dtype = dtype


def _rebuild_tensor(*args: Any) -> _Described:
    storage, first, shape, strides, _requires_grad, _hooks, *metadata = args
    numbers = (first, *shape, *strides)
    if not isinstance(storage, _Storage) or not all(type(number) is int for number in numbers) or any(metadata):
        raise pickle.UnpicklingError("it is no plain tensor")
    return _Described(storage, first, tuple(shape), tuple(strides))


class _TensorUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _rebuild_tensor
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict  # of a tensor's hooks, which are none
        if (module, name) in STORAGES:
            return _DtypeOf(STORAGES[module, name])
        raise pickle.UnpicklingError(f"it asks for {module}.{name}")

    def persistent_load(self, reference: Any) -> _Storage:
        kind, dtype, name, _device, _numbers = reference
        if kind != "storage" or not isinstance(dtype, _DtypeOf) or not isinstance(name, str):
            raise pickle.UnpicklingError("it refers to something that is no storage")
        return _Storage(dtype.dtype, name)


def read_torch_archive(buffer: npt.NDArray[np.uint8]) -> StoredTensor:
    """Return the tensor of a file that ``torch.save`` wrote. Raises ``InvalidRequestError``."""
    members = _members(buffer)
    pickles = [name for name in members if name.endswith("/data.pkl")]
    if len(pickles) != 1:
        raise refused("The zip is none that torch.save writes: it has no data.pkl.")
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


def _unpickle(pickled: bytes) -> _Described:
    try:
        _require_plain(pickled)
        described = _TensorUnpickler(io.BytesIO(pickled)).load()
    except pickle.UnpicklingError as error:
        raise _no_plain_tensor(str(error)) from error
    except Exception as error:  # a pickle that somebody made up can make the unpickler raise anything
        raise _no_plain_tensor("its pickle is broken") from error
    if not isinstance(described, _Described):
        raise _no_plain_tensor(f"it is a {type(described).__name__}")
    return described


def _require_plain(pickled: bytes) -> None:
    for opcode, argument, _ in pickletools.genops(pickled):
        if opcode.name not in OPCODES:
            raise pickle.UnpicklingError(f"its pickle has a {opcode.name}")
        if opcode.name == "LONG_BINPUT" and int(argument or 0) > MAX_MEMO:
            raise pickle.UnpicklingError("its pickle remembers too much")


def _no_plain_tensor(reason: str) -> InvalidRequestError:
    return refused(
        "What torch.save wrote is not read: only one dense tensor of float16, bfloat16 or float32 is, no parameter, "
        f"list, dict or sparse tensor; {reason}."
    )


def _members(buffer: npt.NDArray[np.uint8]) -> dict[str, tuple[int, int]]:
    """Return the first byte of each member, and the one behind its last."""
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
            members[name] = _place(buffer, offset, size)
            directory = directory[46 + name_length + extra_length + comment_length :]
    except (struct.error, UnicodeDecodeError) as error:
        raise refused("The tensor is truncated: the zip's directory cannot be read.") from error
    return members


def _directory(buffer: npt.NDArray[np.uint8]) -> tuple[bytes, int]:
    """Return a zip's directory and how many entries it has. torch writes no comment behind it."""
    signature, entries, size, offset = struct.unpack("<4s6xH2L2x", buffer[-22:].tobytes())
    if signature != b"PK\5\6":
        raise refused("The tensor is truncated: the zip has no end.")
    if size > MAX_DIRECTORY or offset + size > len(buffer):
        raise refused(f"The zip's directory claims {size} bytes; at most {MAX_DIRECTORY} are read.")
    return buffer[offset : offset + size].tobytes(), entries


def _place(buffer: npt.NDArray[np.uint8], offset: int, size: int) -> tuple[int, int]:
    """Return where a member's bytes are, behind the header that it has of its own."""
    signature, name_length, extra_length = struct.unpack("<4s22x2H", buffer[offset : offset + 30].tobytes())
    begin = offset + 30 + name_length + extra_length
    if signature != b"PK\3\4" or begin + size > len(buffer):
        raise refused("The tensor is truncated: the zip's members are not where its directory says.")
    return begin, begin + size
