"""The tensors of safetensors files as NumPy arrays, without torch: tables of static embeddings and LoRA adapters."""

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trio_pool_serve.errors import ModelLoadError, require
from trio_pool_serve.rendering.stored_tensor import TensorEntry, read_header

FILE = "model.safetensors"

MAX_HEADER_BYTES = 10**8
"""The limit of the safetensors library."""

MAX_FILE_BYTES = 2**33
"""Limit of files that are read whole."""

DTYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "I64": "<i8", "I32": "<i4", "I8": "<i1"}
"""NumPy's types by the names of safetensors. NumPy has no bfloat16."""


def read_shapes(file: Path) -> Mapping[str, tuple[int, ...]]:
    """Return the shape of each tensor by name; reads the file's header only. Raises ``ModelLoadError``."""
    with _errors_of(file), file.open("rb") as opened:
        entries, _ = read_header(opened, MAX_HEADER_BYTES)
    return {name: entry.shape for name, entry in entries.items()}


def read_tensors(file: Path, accepted: Collection[str] = DTYPES.keys()) -> tuple[dict[str, npt.NDArray[Any]], bytes]:
    """Return the tensors of a file by name, bfloat16 in float32, and its bytes; other tensors are parts of these.

    Raises ``ModelLoadError`` for types that are not ``accepted``, for numbers that float32 cannot represent, and above
    ``MAX_FILE_BYTES``. Blocks.
    """
    with _errors_of(file):
        require(file.stat().st_size <= MAX_FILE_BYTES, f"{file} exceeds {MAX_FILE_BYTES} bytes.")
        content = file.read_bytes()
        entries, begin = read_header(BytesIO(content), MAX_HEADER_BYTES)
        numbers = np.frombuffer(content, np.uint8, offset=begin)
        end = max([entry.data_offsets[1] for entry in entries.values()], default=0)
        require(len(numbers) == end, "its size does not match its tensors", ValueError)
        for name, entry in entries.items():
            require(entry.dtype in accepted, f"{file}: {name} is in {entry.dtype}; accepted: {', '.join(accepted)}.")
        tensors = {name: _tensor(entry, numbers) for name, entry in entries.items()}
    for name, tensor in tensors.items():
        with np.errstate(over="ignore"):
            bounds = np.array([tensor.min(initial=0), tensor.max(initial=0)]).astype(np.float32)
        require(bool(np.isfinite(bounds).all()), f"{file}: {name} contains infinities or NaN ({tensor.dtype}).")
    return tensors, content


def _tensor(entry: TensorEntry, numbers: npt.NDArray[np.uint8]) -> npt.NDArray[Any]:
    """Return one tensor. Raises ``ValueError`` if its numbers are not all there."""
    dtype = np.dtype(DTYPES[entry.dtype])
    require(entry.fits(dtype.itemsize), "its header contradicts itself", ValueError)
    values = numbers[slice(*entry.data_offsets)].view(dtype).reshape(entry.shape)
    if entry.dtype == "BF16":  # the upper half of float32
        values = (values.astype(np.uint32) << 16).view(np.float32)
    # A copy if an unusual header has moved it: NumPy would copy it at each use.
    return np.require(values, requirements="A")


@contextmanager
def _errors_of(file: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:
        missing = f"{file.parent} contains no {file.name}. Weights in pytorch_model.bin are not supported."
        require(file.exists(), missing)
        raise unreadable(file, error) from error


def unreadable(file: Path, error: Exception) -> ModelLoadError:
    """Return the error of a file of weights that a library could not read.

    The safetensors library reports a file without permission as missing; no library names incomplete downloads.
    """
    try:
        file.open("rb").close()
    except OSError as reason:
        return ModelLoadError(f"{file} cannot be read: {reason.strerror}.")
    return ModelLoadError(
        f"{file} cannot be read: {str(error).partition('. ')[0]}. It is damaged, or an incomplete download."
    )
