"""The tensors of a folder's model.safetensors as NumPy arrays, without torch."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trio_pool_serve.errors import ModelLoadError
from trio_pool_serve.models.files.known_keys import require

FILE = "model.safetensors"

DTYPES = ("F64", "F32", "F16", "I64", "I32", "I8")


def read_shapes(folder: Path) -> Mapping[str, tuple[int, ...]]:
    """Return the shape of each tensor by name; reads the file's header only. Raises ``ModelLoadError``."""
    with _opened(folder) as file:
        return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118  (no mapping)


def read_tensors(folder: Path) -> dict[str, npt.NDArray[Any]]:
    """Return the tensors by name. Raises ``ModelLoadError``, also for infinities and NaN. Blocks."""
    with _opened(folder) as file:
        dtypes = {name: file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118
        for name, dtype in dtypes.items():
            require(dtype in DTYPES, f"{folder / FILE}: {name} is {dtype}; {', '.join(DTYPES)} can be read.")
        tensors = {name: file.get_tensor(name) for name in dtypes}
    for name, tensor in tensors.items():
        if tensor.size and not np.isfinite(np.array([tensor.min(), tensor.max()]).astype(np.float32)).all():
            raise ModelLoadError(f"{folder / FILE}: {name} contains infinities or NaN ({tensor.dtype}).")
    return tensors


@contextmanager
def _opened(folder: Path) -> Iterator[Any]:
    # Imported here: only some kinds of model are read so.
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(folder / FILE, framework="np", backend="pread") as file:
            yield file
    except (SafetensorError, OSError) as error:
        others = " Weights in pytorch_model.bin are not supported." if (folder / "pytorch_model.bin").exists() else ""
        require((folder / FILE).exists(), f"{folder} contains no {FILE}.{others}")
        raise unreadable(folder / FILE, error) from error


def unreadable(file: Path, error: Exception) -> ModelLoadError:
    """Return the error of a file of weights that a library could not read.

    safetensors says of a file without permission that there is none, and no library names an incomplete download.
    """
    try:
        file.open("rb").close()
    except OSError as reason:
        return ModelLoadError(f"{file} cannot be read: {reason.strerror}.")
    return ModelLoadError(
        f"{file} cannot be read: {str(error).partition('. ')[0]}. It is damaged, or an incomplete download."
    )
