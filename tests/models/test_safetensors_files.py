"""Tensors of safetensors files that no library writes."""

import json
import struct
from pathlib import Path

import numpy as np
import pytest

from trio_pool_serve.errors import ModelLoadError
from trio_pool_serve.models.files.safetensors_files import read_shapes, read_tensors

pytestmark = pytest.mark.unit

ROWS = np.arange(6, dtype=np.float32).reshape(2, 3)


def write(file: Path, *, padding: str = "", **changes: object) -> Path:
    entry = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, ROWS.nbytes]} | changes
    header = (json.dumps({"rows": entry, "__metadata__": {"format": "pt"}}) + padding).encode()
    file.write_bytes(struct.pack("<Q", len(header)) + header + ROWS.tobytes())
    return file


def test_numbers_at_any_place_are_read_and_aligned(tmp_path: Path):
    for length in range(4):
        file = write(tmp_path / "model.safetensors", padding=" " * length)
        tensors, content = read_tensors(file)
        assert np.array_equal(tensors["rows"], ROWS)
        assert tensors["rows"].flags.aligned
        assert content == file.read_bytes()
        assert read_shapes(file) == {"rows": (2, 3)}


@pytest.mark.parametrize(
    "changes",
    [
        {"shape": [-2, -3]},
        {"shape": [-1, 3]},
        {"shape": [10**12, 3]},
        {"shape": [10**30, 10**30]},
        {"shape": [1] * 100},
        {"shape": [2, 3.0]},
        {"shape": [4, 3], "data_offsets": [0, 2 * ROWS.nbytes]},
        {"data_offsets": [-ROWS.nbytes, 0]},
        {"data_offsets": [ROWS.nbytes, 2 * ROWS.nbytes]},
        {"data_offsets": [8, 8]},
        {"dtype": 4},
    ],
    ids=str,
)
def test_a_header_that_declares_numbers_that_are_not_there_is_refused(changes: dict[str, object], tmp_path: Path):
    with pytest.raises(ModelLoadError, match=r"model\.safetensors cannot be read: .* or an incomplete download\."):
        read_tensors(write(tmp_path / "model.safetensors", **changes))


def test_bytes_that_belong_to_no_tensor_are_refused_as_by_the_library(tmp_path: Path):
    file = write(tmp_path / "model.safetensors")
    file.write_bytes(file.read_bytes() + b"more")
    with pytest.raises(ModelLoadError, match="its size does not match its tensors"):
        read_tensors(file)
