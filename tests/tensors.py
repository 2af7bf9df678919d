"""Tensors as their authors' libraries write them, and as an attacker would."""

import collections
import io
import pickle
import struct
import zipfile
from collections.abc import Callable, Mapping
from typing import Any

import attrs
import numpy as np
import safetensors.torch
import torch
from torch import Tensor

from trio_pool_serve.errors import ContextLengthError, EmptyInputError, InvalidRequestError

WIDTH = 16
MAX_ROWS = 64


def as_torch(tensor: Any, **options: Any) -> bytes:
    file = io.BytesIO()
    torch.save(tensor, file, **options)
    return file.getvalue()


def as_safetensors(tensor: Tensor) -> bytes:
    return safetensors.torch.save({"embeds": tensor.contiguous()}, metadata={"format": "pt"})


def as_npy(tensor: Tensor) -> bytes:
    return numpy_file(tensor.numpy())


def numpy_file(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array, allow_pickle=True)
    return file.getvalue()


FORMS: Mapping[str, Callable[[Tensor], bytes]] = {
    "torch.save": as_torch,
    "safetensors": as_safetensors,
    "npy": as_npy,
}

ROWS = torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(0))


def rezipped(archive: bytes, edit: Callable[[str, bytes], bytes], compression: int = zipfile.ZIP_STORED) -> bytes:
    """Write a zip again with members that ``edit(name, content)`` returns."""
    file = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(archive)) as old, zipfile.ZipFile(file, "w", compression) as new:
        for name in old.namelist():
            new.writestr(name, edit(name, old.read(name)))
    return file.getvalue()


def with_pickle(pickled: bytes) -> bytes:
    """What torch.save writes, with another pickle."""
    return rezipped(as_torch(ROWS), lambda name, content: pickled if name.endswith("data.pkl") else content)


def without_numbers() -> bytes:
    return rezipped(as_torch(ROWS), lambda name, content: b"" if name.endswith("data/0") else content)


@attrs.frozen
class Storage:
    """What a pickle of torch names by reference."""


class _Described:
    """Pickled as torch pickles a tensor, of whatever numbers."""

    def __init__(self, *numbers: Any) -> None:
        self.numbers = numbers

    def __reduce__(self) -> Any:
        first, shape, strides = self.numbers
        return (torch._utils._rebuild_tensor_v2, (Storage(), first, shape, strides, False, collections.OrderedDict()))


class _Pickler(pickle.Pickler):
    def persistent_id(self, obj: Any) -> Any:
        return ("storage", torch.FloatStorage, "0", "cpu", ROWS.numel()) if isinstance(obj, Storage) else None


def described(shape: Any, strides: Any, first: Any = 0) -> bytes:
    """The file of ``ROWS`` with other sizes in its pickle."""
    file = io.BytesIO()
    _Pickler(file, 2).dump(_Described(first, shape, strides))
    return with_pickle(file.getvalue())


class RunsCode:
    def __reduce__(self) -> Any:
        return (exec, ("raise SystemExit('the pickle has run')",))


class Enlarges:
    """``weights_only`` lets a pickle make a bytearray of any size."""

    def __reduce__(self) -> Any:
        return (bytearray, (2**40,))


def safetensors_header(header: bytes, *, length: int | None = None, numbers: int = 5 * WIDTH * 4) -> bytes:
    return struct.pack("<Q", len(header) if length is None else length) + header + bytes(numbers)


def npy_header(descr: str, shape: str) -> bytes:
    header = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + bytes(5 * WIDTH * 4)


def _with_nan() -> Tensor:
    rows = ROWS.clone()
    rows[3, 7] = float("nan")
    return rows


def _sparse() -> Tensor:
    return torch.sparse_coo_tensor([[0], [0]], [1.0], (10**9, WIDTH), check_invariants=False)


SIZES = b'{"a":{"dtype":"F32","shape":[%d,%d],"data_offsets":[0,%d]}}'

HOSTILE: Mapping[str, tuple[bytes, type[InvalidRequestError], str]] = {
    "nothing": (b"", EmptyInputError, "no tensor"),
    "unknown format": (b"GIF89a" + bytes(99), InvalidRequestError, "unknown format"),
    "sparse bomb": (as_torch(_sparse()), InvalidRequestError, "dense tensor"),
    "expanded bomb": (as_torch(torch.zeros(1, WIDTH).expand(10**12, WIDTH)), InvalidRequestError, "expanded"),
    "expanded rows": (as_torch(torch.zeros(1, WIDTH).expand(2, WIDTH)), InvalidRequestError, "expanded"),
    "expanded columns": (as_torch(torch.zeros(5, 1).expand(5, WIDTH)), InvalidRequestError, "expanded"),
    "one number": (as_torch(torch.zeros(1).expand(5, WIDTH)), InvalidRequestError, "expanded"),
    "sliding window": (as_torch(torch.zeros(40).unfold(0, WIDTH, 1)), InvalidRequestError, "overlapping"),
    "enormous shape": (described((10**500, WIDTH), (WIDTH, 1)), InvalidRequestError, "are not valid"),
    "enormous stride": (described((1, WIDTH), (2**63, 1)), InvalidRequestError, "are not valid"),
    "negative shape": (described((-5, WIDTH), (WIDTH, 1)), InvalidRequestError, "are not valid"),
    "negative stride": (described((5, WIDTH), (-WIDTH, 1)), InvalidRequestError, "are not valid"),
    "shape of a bool": (described((True, WIDTH), (WIDTH, 1)), InvalidRequestError, "not a plain tensor"),
    "stride of a bool": (described((5, WIDTH), (WIDTH, True)), InvalidRequestError, "not a plain tensor"),
    "shape of a float": (described((5.0, WIDTH), (WIDTH, 1)), InvalidRequestError, "BINFLOAT"),
    "offset of a bool": (described((1, WIDTH), (WIDTH, 1), first=True), InvalidRequestError, "not a plain tensor"),
    "no strides": (described((5, WIDTH), ()), InvalidRequestError, "are not valid"),
    "thousands of dimensions": (described((1,) * 3000, (1,) * 3000), InvalidRequestError, "3000 dimensions"),
    "meta": (as_torch(torch.zeros(10**6, WIDTH, device="meta")), InvalidRequestError, "dense tensor"),
    "bytes": (as_torch(torch.zeros(5, WIDTH, dtype=torch.int8)), InvalidRequestError, "CharStorage"),
    "complex": (as_torch(ROWS.to(torch.complex64)), InvalidRequestError, "ComplexFloatStorage"),
    "integers": (as_torch(ROWS.long()), InvalidRequestError, "LongStorage"),
    "float64": (as_torch(ROWS.double()), InvalidRequestError, "DoubleStorage"),
    "parameter": (as_torch(torch.nn.Parameter(ROWS)), InvalidRequestError, "_rebuild_parameter"),
    "dict": (as_torch({"embeds": ROWS}), InvalidRequestError, "EMPTY_DICT"),
    "list": (as_torch([ROWS]), InvalidRequestError, "EMPTY_LIST"),
    "number": (as_torch(7), InvalidRequestError, "it is a int"),
    "pickle with code": (with_pickle(pickle.dumps(RunsCode(), 2)), InvalidRequestError, "exec"),
    "pickle that enlarges": (with_pickle(pickle.dumps(Enlarges(), 2)), InvalidRequestError, "bytearray"),
    "pickle that remembers": (with_pickle(b"\x80\x02Nr\xff\xff\xff\x7f."), InvalidRequestError, "memo of more than"),
    "long pickle": (with_pickle(b"\x80\x02" + b"N" * 100_000 + b"."), InvalidRequestError, "at most"),
    "broken pickle": (with_pickle(b"\x80\x02X\xff\xff\xff\xff"), InvalidRequestError, "broken"),
    "empty pickle": (with_pickle(b""), InvalidRequestError, "broken"),
    "plain pickle": (as_torch(ROWS, _use_new_zipfile_serialization=False), InvalidRequestError, "plain pickle"),
    "compressed zip": (
        rezipped(as_torch(ROWS), lambda _, content: content, zipfile.ZIP_DEFLATED),
        InvalidRequestError,
        "compressed",
    ),
    "zip of something else": (
        rezipped(as_torch(ROWS), lambda _, content: content).replace(b"data.pkl", b"info.txt"),
        InvalidRequestError,
        "no data.pkl",
    ),
    "zip with a huge directory": (
        as_torch(ROWS)[:-22] + struct.pack("<4s6xH2L2x", b"PK\5\6", 65535, 2**31, 0),
        InvalidRequestError,
        "directory claims",
    ),
    "truncated archive": (as_torch(ROWS)[:-100], InvalidRequestError, "truncated"),
    "storage too short": (without_numbers(), InvalidRequestError, "truncated"),
    "one dimension": (as_torch(ROWS[0]), InvalidRequestError, "1 dimensions"),
    "three dimensions": (as_torch(ROWS[None]), InvalidRequestError, "3 dimensions"),
    "no dimension": (as_npy(ROWS[0, 0]), InvalidRequestError, "0 dimensions"),
    "too narrow": (as_safetensors(ROWS[:, 1:]), InvalidRequestError, "15 wide"),
    "no rows": (as_torch(ROWS[:0]), EmptyInputError, "no rows"),
    "too many rows": (as_npy(torch.zeros(MAX_ROWS + 1, WIDTH)), ContextLengthError, "at most 64 rows"),
    "too many bytes": (as_npy(torch.zeros(100 * MAX_ROWS, WIDTH)), ContextLengthError, "bytes"),
    "not a number": (as_torch(_with_nan()), InvalidRequestError, "not finite"),
    "infinite": (as_safetensors((ROWS * 1e38 * 1e10).bfloat16()), InvalidRequestError, "not finite"),
    "infinite halves": (as_npy((ROWS * 1e6).half()), InvalidRequestError, "not finite"),
    "two tensors": (
        safetensors.torch.save({"a": ROWS, "b": ROWS.clone()}),
        InvalidRequestError,
        "holds 2 tensors",
    ),
    "safetensors of integers": (as_safetensors(ROWS.long()), InvalidRequestError, "I64"),
    "long safetensors header": (safetensors_header(b"{}", length=2**62), InvalidRequestError, "claims"),
    "broken safetensors header": (safetensors_header(b'{"a":'), InvalidRequestError, "cannot be read"),
    "safetensors bomb": (safetensors_header(SIZES % (10**12, WIDTH, 320)), InvalidRequestError, "contradict"),
    "safetensors of negative sizes": (safetensors_header(SIZES % (-5, -WIDTH, 320)), InvalidRequestError, "contradict"),
    **{
        f"safetensors with {size} rows": (
            safetensors_header(b'{"a":{"dtype":"F32","shape":[%s,16],"data_offsets":[0,64]}}' % size.encode()),
            InvalidRequestError,
            "cannot be read",
        )
        for size in ("true", "1.0", "1e0", '"1"', "null")
    },
    "safetensors with enormous sizes": (
        safetensors_header(SIZES % (10**30, 10**30, 320)),
        InvalidRequestError,
        "contradict",
    ),
    "safetensors with too many rows": (
        safetensors_header(SIZES % (2**63, 0, 0)),
        InvalidRequestError,
        "are not valid",
    ),
    "safetensors with a place that is true": (
        safetensors_header(b'{"a":{"dtype":"F32","shape":[5,16],"data_offsets":[false,320]}}'),
        InvalidRequestError,
        "cannot be read",
    ),
    "truncated safetensors": (as_safetensors(ROWS)[:-1], InvalidRequestError, "truncated"),
    "truncated array": (as_npy(ROWS)[:-1], InvalidRequestError, "truncated"),
    "array bomb": (npy_header("'<f4'", f"({10**15}, {WIDTH})"), InvalidRequestError, "truncated"),
    "array of negative sizes": (npy_header("'<f4'", f"(-5, -{WIDTH})"), InvalidRequestError, "are not valid"),
    "array of a bool": (npy_header("'<f4'", f"(True, {WIDTH})"), InvalidRequestError, "are not valid"),
    "array of False": (npy_header("'<f4'", f"(False, {WIDTH})"), InvalidRequestError, "are not valid"),
    "array of a float": (npy_header("'<f4'", f"(5.0, {WIDTH})"), InvalidRequestError, "cannot be read"),
    "array of enormous sizes": (npy_header("'<f4'", f"({10**2000}, 0)"), InvalidRequestError, "are not valid"),
    "array of float64": (numpy_file(ROWS.double().numpy()), InvalidRequestError, "<f8"),
    "array of big-endian numbers": (numpy_file(ROWS.numpy().astype(">f4")), InvalidRequestError, ">f4"),
    "array of objects": (numpy_file(np.array([RunsCode()])), InvalidRequestError, "|O"),
    "array of records": (npy_header("[('a', '<f4'), ('b', '<f4')]", "(5,)"), InvalidRequestError, "|V8"),
    "broken array header": (npy_header("'<f4'", "((((("), InvalidRequestError, "cannot be read"),
    "array of version 3": (as_npy(ROWS).replace(b"NUMPY\x01", b"NUMPY\x03"), InvalidRequestError, "versions"),
}
"""By what is wrong: the bytes, the error, and something that it says."""
