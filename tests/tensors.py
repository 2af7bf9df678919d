"""Tensors as their authors' libraries write them, and as an attacker would."""

import struct
from collections.abc import Callable, Mapping

import numpy as np
import safetensors.torch
import torch
from torch import Tensor

from tests.model_folders import numpy_file
from tests.torch_files import NOT_VALID_TORCH, ROWS, WIDTH, RunsCode, as_torch
from trio_pool_serve.errors import ContextLengthError, EmptyInputError, InvalidRequestError

MAX_ROWS = 64


def as_safetensors(tensor: Tensor) -> bytes:
    return safetensors.torch.save({"embeds": tensor.contiguous()}, metadata={"format": "pt"})


def as_npy(tensor: Tensor) -> bytes:
    return numpy_file(tensor.numpy())


FORMS: Mapping[str, Callable[[Tensor], bytes]] = {
    "torch.save": as_torch,
    "safetensors": as_safetensors,
    "npy": as_npy,
}


def safetensors_header(header: bytes, *, length: int | None = None, numbers: int = 5 * WIDTH * 4) -> bytes:
    return struct.pack("<Q", len(header) if length is None else length) + header + bytes(numbers)


def npy_header(descr: str, shape: str) -> bytes:
    header = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + bytes(5 * WIDTH * 4)


def _with_nan() -> Tensor:
    rows = ROWS.clone()
    rows[3, 7] = float("nan")
    return rows


SIZES = b'{"a":{"dtype":"F32","shape":[%d,%d],"data_offsets":[0,%d]}}'

NOT_VALID: Mapping[str, tuple[bytes, str]] = {
    "unknown format": (b"GIF89a" + bytes(99), "unknown format"),
    "one dimension": (as_npy(ROWS[0]), "1 dimensions"),
    "three dimensions": (as_npy(ROWS[None]), "3 dimensions"),
    "no dimension": (as_npy(ROWS[0, 0]), "0 dimensions"),
    "too narrow": (as_safetensors(ROWS[:, 1:]), "15 wide"),
    "not a number": (as_npy(_with_nan()), "not finite"),
    "infinite": (as_safetensors((ROWS * 1e38 * 1e10).bfloat16()), "not finite"),
    "infinite halves": (as_npy((ROWS * 1e6).half()), "not finite"),
    "two tensors": (safetensors.torch.save({"a": ROWS, "b": ROWS.clone()}), "holds 2 tensors"),
    "safetensors of integers": (as_safetensors(ROWS.long()), "I64"),
    "long safetensors header": (safetensors_header(b"{}", length=2**62), "claims"),
    "broken safetensors header": (safetensors_header(b'{"a":'), "cannot be read"),
    "safetensors bomb": (safetensors_header(SIZES % (10**12, WIDTH, 320)), "contradict"),
    "safetensors of negative sizes": (safetensors_header(SIZES % (-5, -WIDTH, 320)), "contradict"),
    **{
        f"safetensors with {size} rows": (
            safetensors_header(b'{"a":{"dtype":"F32","shape":[%s,16],"data_offsets":[0,64]}}' % size.encode()),
            "cannot be read",
        )
        for size in ("true", "1.0", "1e0", '"1"', "null")
    },
    "safetensors with enormous sizes": (safetensors_header(SIZES % (10**30, 10**30, 320)), "contradict"),
    "safetensors with too many rows": (safetensors_header(SIZES % (2**63, 0, 0)), "are not valid"),
    "safetensors with a place that is true": (
        safetensors_header(b'{"a":{"dtype":"F32","shape":[5,16],"data_offsets":[false,320]}}'),
        "cannot be read",
    ),
    "truncated safetensors": (as_safetensors(ROWS)[:-1], "truncated"),
    "truncated array": (as_npy(ROWS)[:-1], "truncated"),
    "thousands of dimensions": (npy_header("'<f4'", f"({'1,' * 3000})"), "3000 dimensions"),
    "array bomb": (npy_header("'<f4'", f"({10**15}, {WIDTH})"), "truncated"),
    "array of negative sizes": (npy_header("'<f4'", f"(-5, -{WIDTH})"), "are not valid"),
    "array of a bool": (npy_header("'<f4'", f"(True, {WIDTH})"), "are not valid"),
    "array of False": (npy_header("'<f4'", f"(False, {WIDTH})"), "are not valid"),
    "array of a float": (npy_header("'<f4'", f"(5.0, {WIDTH})"), "cannot be read"),
    "array of enormous sizes": (npy_header("'<f4'", f"({10**2000}, 0)"), "are not valid"),
    "array of float64": (numpy_file(ROWS.double().numpy()), "<f8"),
    "array of big-endian numbers": (numpy_file(ROWS.numpy().astype(">f4")), ">f4"),
    "array of objects": (numpy_file(np.array([RunsCode()])), "|O"),
    "array of records": (npy_header("[('a', '<f4'), ('b', '<f4')]", "(5,)"), "|V8"),
    "broken array header": (npy_header("'<f4'", "((((("), "cannot be read"),
    **NOT_VALID_TORCH,
    "array of version 3": (as_npy(ROWS).replace(b"NUMPY\x01", b"NUMPY\x03"), "versions"),
}

HOSTILE: Mapping[str, tuple[bytes, type[InvalidRequestError], str]] = {
    "nothing": (b"", EmptyInputError, "no tensor"),
    "no rows": (as_npy(ROWS[:0]), EmptyInputError, "no rows"),
    "too many rows": (as_npy(torch.zeros(MAX_ROWS + 1, WIDTH)), ContextLengthError, "at most 64 rows"),
    "too many bytes": (as_npy(torch.zeros(100 * MAX_ROWS, WIDTH)), ContextLengthError, "bytes"),
    **{name: (stored, InvalidRequestError, said) for name, (stored, said) in NOT_VALID.items()},
}
"""By what is wrong: the bytes, the error, and something that it says."""
