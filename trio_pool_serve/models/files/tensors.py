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
        with safe_open(folder / FILE, framework="np") as file:
            yield file
    except FileNotFoundError as error:
        others = " Weights in pytorch_model.bin are not supported." if (folder / "pytorch_model.bin").exists() else ""
        raise ModelLoadError(f"{folder} contains no {FILE}.{others}") from error
    except (SafetensorError, OSError) as error:
        raise ModelLoadError(f"{folder / FILE} cannot be read: {error}") from error
