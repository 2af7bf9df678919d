"""Files of ``torch.save``, as torch writes them and as an attacker would."""

import collections
import io
import pickle
import struct
import zipfile
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

WIDTH = 16

ROWS = torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(0))


def as_torch(tensor: Any, **options: Any) -> bytes:
    file = io.BytesIO()
    torch.save(tensor, file, **options)
    return file.getvalue()


class RunsCode:
    def __reduce__(self) -> Any:
        return (exec, ("raise SystemExit('the pickle has run')",))


class Enlarges:
    """``weights_only`` lets a pickle make a bytearray of any size."""

    def __reduce__(self) -> Any:
        return (bytearray, (2**40,))


def rezipped(edit: Callable[[str, bytes], bytes | None], compression: int = zipfile.ZIP_STORED) -> bytes:
    """Return the file of ``ROWS`` with the members that ``edit(name, content)`` returns; ``None`` leaves one out."""
    file = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(as_torch(ROWS))) as old, zipfile.ZipFile(file, "w", compression) as new:
        for name in old.namelist():
            content = edit(name, old.read(name))
            if content is not None:
                new.writestr(name, content)
    return file.getvalue()


def with_member(ending: str, content: bytes | None) -> bytes:
    return rezipped(lambda name, old: content if name.endswith(ending) else old)


def with_pickle(*opcodes: bytes) -> bytes:
    """Return what torch.save writes, with another pickle, of protocol 2."""
    return with_member("data.pkl", b"\x80\x02" + b"".join(opcodes) + b".")


class _Storage:
    """What a pickle of torch names by reference."""

    def __init__(self, *reference: Any) -> None:
        self.reference = reference


class _Described:
    """Pickled as torch pickles a tensor, of whatever numbers."""

    def __init__(self, storage: Any, *numbers: Any) -> None:
        self.storage, self.numbers = storage, numbers

    def __reduce__(self) -> Any:
        return (torch._utils._rebuild_tensor_v2, (self.storage, *self.numbers, False, collections.OrderedDict()))


class _Pickler(pickle.Pickler):
    def persistent_id(self, obj: Any) -> Any:
        return obj.reference if isinstance(obj, _Storage) else None


def described(
    shape: Any, strides: Any, first: Any = 0, count: Any = 5 * WIDTH, name: Any = "0", of: Any = torch.FloatStorage
) -> bytes:
    """Return the file of ``ROWS`` with other sizes in its pickle."""
    file = io.BytesIO()
    _Pickler(file, 2).dump(_Described(_Storage("storage", of, name, "cpu", count), first, shape, strides))
    return with_member("data.pkl", file.getvalue())


def nested(times: int) -> bytes:
    """Return the opcodes of a tuple of twice the same tuple, and so on: hashing it takes ``2**times`` steps."""
    return b")q\x01" + b"h\x01\x86q\x01" * times


def edited(record: bytes, offset: int, form: str, *values: int) -> bytes:
    """Return the file of ``ROWS`` with other numbers in a record of the zip, ``offset`` bytes behind its beginning."""
    changed = bytearray(as_torch(ROWS))
    struct.pack_into(form, changed, changed.index(record) + offset, *values)
    return bytes(changed)


ENTRY, END = b"PK\1\2", b"PK\6\6"
"""The beginnings of a zip's first entry in its directory, which is the pickle's, and of its end."""


def with_many_members() -> bytes:
    """Return a zip whose directory is far longer than that of a tensor."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as new:
        for number in range(2000):
            new.writestr(f"archive/{number}", b"")
    return file.getvalue()


def with_a_name_twice() -> bytes:
    file = io.BytesIO(as_torch(ROWS))
    with zipfile.ZipFile(file, "a") as archive:
        archive.writestr("another/version", b"3")
    return file.getvalue()


GLOBAL_REBUILD = b"ctorch._utils\n_rebuild_tensor_v2\n"
GLOBAL_HOOKS = b"ccollections\nOrderedDict\n"
GLOBAL_FLOATS = b"ctorch\nFloatStorage\n"
EXPANDED = torch.zeros(1, WIDTH).expand(10**12, WIDTH)


def _sparse() -> Tensor:
    return torch.sparse_coo_tensor([[0], [0]], [1.0], (10**9, WIDTH), check_invariants=False)


NOT_A_TENSOR: Mapping[str, tuple[bytes, str]] = {
    "sparse bomb": (as_torch(_sparse()), "_rebuild_sparse_tensor"),
    "expanded bomb": (as_torch(EXPANDED), "expanded"),
    "expanded rows": (as_torch(torch.zeros(1, WIDTH).expand(2, WIDTH)), "expanded"),
    "expanded columns": (as_torch(torch.zeros(5, 1).expand(5, WIDTH)), "expanded"),
    "one number": (as_torch(torch.zeros(1).expand(5, WIDTH)), "expanded"),
    "sliding window": (as_torch(torch.zeros(40).unfold(0, WIDTH, 1)), "expanded"),
    "meta": (as_torch(torch.zeros(10**6, WIDTH, device="meta")), "_rebuild_meta_tensor_no_storage"),
    "bytes": (as_torch(torch.zeros(5, WIDTH, dtype=torch.int8)), "CharStorage"),
    "complex": (as_torch(ROWS.to(torch.complex64)), "ComplexFloatStorage"),
    "integers": (as_torch(ROWS.long()), "LongStorage"),
    "float64": (as_torch(ROWS.double()), "DoubleStorage"),
    "8-bit floats": (as_torch(ROWS.to(torch.float8_e4m3fn)), "_rebuild_tensor_v3"),
    "negated view": (as_torch(torch.complex(ROWS, ROWS).conj().imag), "EMPTY_DICT"),
    "storage": (as_torch(ROWS.untyped_storage()), "UntypedStorage"),
    "dict": (as_torch({"embeds": ROWS}), "EMPTY_DICT"),
    "list": (as_torch([ROWS]), "APPEND"),
    "number": (as_torch(7), "it is a int"),
    "protocol 4": (as_torch(ROWS, pickle_protocol=4), "FRAME"),
    "old format": (as_torch(ROWS, _use_new_zipfile_serialization=False), "old format"),
}
"""What ``torch.save`` writes, but no tensor that is accepted."""

WRONG_SIZES: Mapping[str, tuple[bytes, str]] = {
    "enormous shape": (described((10**500, WIDTH), (WIDTH, 1)), "are not valid"),
    "enormous stride": (described((1, WIDTH), (2**63, 1)), "are not valid"),
    "long stride": (described((2, WIDTH), (2**60, 1)), "truncated"),
    "one number too many": (described((5, WIDTH - 1), (WIDTH, 1), first=2), "truncated"),
    "negative shape": (described((-5, WIDTH), (WIDTH, 1)), "are not valid"),
    "negative stride": (described((5, WIDTH), (-WIDTH, 1)), "are not valid"),
    "negative offset": (described((5, WIDTH), (WIDTH, 1), first=-1), "are not valid"),
    "offset behind the end": (described((1, WIDTH), (WIDTH, 1), first=2**40), "truncated"),
    "shape of a bool": (described((True, WIDTH), (WIDTH, 1)), "are not valid"),
    "stride of a bool": (described((5, WIDTH), (WIDTH, True)), "not a plain tensor"),
    "offset of a bool": (described((1, WIDTH), (WIDTH, 1), first=True), "not a plain tensor"),
    "shape of a float": (described((5.0, WIDTH), (WIDTH, 1)), "BINFLOAT"),
    "shape that is none": (described(5, (WIDTH, 1)), "broken"),
    "no strides": (described((5, WIDTH), ()), "broken"),
    "one stride": (described((5, WIDTH), (1,)), "broken"),
    "hundreds of dimensions": (described((1,) * 300, (1,) * 300), "300 dimensions"),
    "storage that is too large": (described((5, WIDTH), (WIDTH, 1), count=10**9), "truncated"),
    "storage of a negative size": (described((5, WIDTH), (WIDTH, 1), count=-1), "are not valid"),
    "storage of a bool": (described((5, WIDTH), (WIDTH, 1), count=True), "are not valid"),
    "storage without a name": (described((5, WIDTH), (WIDTH, 1), name=0), "not a storage"),
    "storage that is missing": (described((5, WIDTH), (WIDTH, 1), name="1"), "missing"),
    "storage of a function": (described((5, WIDTH), (WIDTH, 1), of=torch._utils._rebuild_tensor_v2), "not a storage"),
    "no numbers": (with_member("data/0", b""), "truncated"),
}

PICKLES: Mapping[str, tuple[bytes, str]] = {
    "code": (with_member("data.pkl", pickle.dumps(RunsCode(), 2)), "exec"),
    "a large object": (with_member("data.pkl", pickle.dumps(Enlarges(), 2)), "bytearray"),
    "eval": (with_pickle(b"c__builtin__\neval\nX\x01\0\0\0007\x85R"), "eval"),
    "a module that is not Unicode": (with_pickle(b"cos.\xed\xa0\x80\nx\n"), "broken"),
    "a large memo": (with_pickle(b"Nr\xff\xff\xff\x7f"), "opcode"),
    "a large byte array": (with_pickle(b"\x96" + struct.pack("<Q", 2**40)), "broken"),
    "a large text": (with_pickle(b"X\xff\xff\xff\xff"), "broken"),
    "a large number": (with_pickle(b"\x8b" + struct.pack("<i", 2**30)), "broken"),
    "a change of a function": (with_pickle(GLOBAL_REBUILD, b"N}\x86b"), "opcode"),
    "hooks that are hashed": (with_pickle(GLOBAL_HOOKS, nested(200), b"K\1\x86\x85\x85R"), "broken"),
    "a type that is hashed": (with_pickle(b"(X\x07\0\0\0storage", nested(200), b"X\1\0\0\0000)K\1tQ"), "not a storage"),
    "a name that is hashed": (
        with_pickle(b"(X\x07\0\0\0storage", GLOBAL_FLOATS, nested(200), b")K\1tQ"),
        "not a storage",
    ),
    "a call of a text": (with_pickle(b"X\1\0\0\0a)R"), "broken"),
    "a call of a type of storage": (with_pickle(GLOBAL_FLOATS, b")R"), "broken"),
    "a type of storage": (with_pickle(GLOBAL_FLOATS), "it is a str"),
    "a tensor of no storage": (with_pickle(GLOBAL_REBUILD, b"()K\0))))tR"), "not a plain tensor"),
    "deep tuples": (with_pickle(b")" + b"\x85" * 4000), "it is a tuple"),
    "nothing": (with_member("data.pkl", b""), "0 bytes"),
    "no end": (with_member("data.pkl", b"\x80\x02N"), "broken"),
    "no stack": (with_pickle(b"R"), "broken"),
}

ARCHIVES: Mapping[str, tuple[bytes, str]] = {
    "no pickle": (with_member("data.pkl", None), "0 bytes"),
    "compressed members": (rezipped(lambda _, content: content, zipfile.ZIP_DEFLATED), "compressed"),
    "a bomb": (rezipped(lambda _, content: content + bytes(2**20), zipfile.ZIP_DEFLATED), "compressed"),
    "an encrypted member": (edited(ENTRY, 8, "<H", 1), "encrypted"),
    "a member of two sizes": (edited(ENTRY, 24, "<L", 2**31), "compressed"),
    "a member that is too large": (edited(ENTRY, 20, "<2L", 9999, 9999), "truncated"),
    "members that overlap": (edited(ENTRY, 20, "<2L", 1700, 1700), "overlap"),
    "a member behind the end": (edited(ENTRY, 42, "<L", 2**31), "truncated"),
    "a member elsewhere": (edited(ENTRY, 42, "<L", 7), "truncated"),
    "a name twice": (with_a_name_twice(), "same name"),
    "a directory of exabytes": (edited(END, 40, "<Q", 2**60), "directory"),
    "a directory elsewhere": (edited(END, 48, "<Q", 2**60), "directory"),
    "big-endian numbers": (with_member("byteorder", b"big"), "big-endian"),
    "something in front": (b"GIF89a" + as_torch(ROWS), "unknown format"),
    "the beginning": (as_torch(ROWS)[:-1], "directory"),
}

NOT_VALID_TORCH: Mapping[str, tuple[bytes, str]] = {
    f"torch.save: {kind}{name}": case
    for kind, cases in (("", NOT_A_TENSOR), ("", WRONG_SIZES), ("a pickle of ", PICKLES), ("a zip with ", ARCHIVES))
    for name, case in cases.items()
}
"""By what is wrong: the bytes, and something that the error says."""

LONG: Mapping[str, tuple[bytes, str]] = {
    "tuples of a million levels": (with_pickle(b")" + b"\x85" * 10**6), "1000004 bytes"),
    "a long directory": (with_many_members(), "directory"),
}
"""Likewise, but longer than the tensors of the tests' models."""
