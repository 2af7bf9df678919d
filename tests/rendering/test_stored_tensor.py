"""Files of ``torch.save`` are read as torch reads them, without torch and without what a file only asks for."""

import io
import subprocess
import sys
import tracemalloc
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.torch_files import EXPANDED, LONG, NOT_VALID_TORCH, ROWS, as_torch
from trio_pool_serve.errors import InvalidRequestError
from trio_pool_serve.rendering.stored_tensor import StoredTensor, read_tensor

KIB = 1024


def read(stored: bytes) -> StoredTensor:
    return read_tensor(np.frombuffer(stored, np.uint8))


def loaded(stored: bytes) -> Tensor:
    """Return what vLLM makes of it."""
    tensor: Any = torch.load(io.BytesIO(stored), weights_only=True)
    assert isinstance(tensor, Tensor)
    return tensor.detach()


def rows_of(tensor: StoredTensor) -> Tensor:
    return torch.from_numpy(tensor.rows(0, tensor.shape[0]).copy()).view(getattr(torch, tensor.dtype))


VIEWS = {
    "whole": ROWS,
    "parameter": torch.nn.Parameter(ROWS),
    "parameter that is not trained": torch.nn.Parameter(ROWS, requires_grad=False),
    "leaf": ROWS.clone().requires_grad_(),
    "rows of a larger one": torch.randn(100, 16)[3:8],
    "columns of a larger one": torch.randn(5, 48)[:, 7:23],
    "every other row": torch.randn(11, 16)[1::2],
    "every third column": torch.randn(5, 48)[:, 2::3],
    "transposed": torch.randn(16, 5).t(),
    "row of a transposed one": torch.randn(16, 5).t()[4:],
    "layer of three": torch.randn(2, 3, 16)[1],
    "one that was a batch": torch.randn(1, 5, 16).squeeze(0),
    "one row": ROWS[2:3],
    "one number": ROWS[:1, :1],
    "no rows": ROWS[:0],
    "pooled rows": torch.randn(40).as_strided((5, 4), (8, 1), 3),
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", VIEWS)
def test_a_tensor_is_what_torch_loads(name, dtype):
    stored = as_torch(VIEWS[name] if dtype is torch.float32 else VIEWS[name].detach().to(dtype))
    assert torch.equal(rows_of(read(stored)), loaded(stored))


def test_a_file_of_another_name_or_protocol_or_without_checksums_is_read(tmp_path):
    torch.save(ROWS, tmp_path / "my rows.of.mine")
    for stored in ((tmp_path / "my rows.of.mine").read_bytes(), as_torch(ROWS, pickle_protocol=3)):
        assert torch.equal(rows_of(read(stored)), ROWS)
    torch.serialization.set_crc32_options(False)
    try:
        assert torch.equal(rows_of(read(as_torch(ROWS))), ROWS)
    finally:
        torch.serialization.set_crc32_options(True)


@pytest.mark.parametrize("name", [*NOT_VALID_TORCH, *LONG])
def test_a_file_that_is_refused_takes_no_memory_and_no_time(name):
    """Of each, torch takes what it asks for: of the sparse bomb gigabytes, of hooks that are hashed centuries."""
    stored, said = {**NOT_VALID_TORCH, **LONG}[name]
    tracemalloc.start()
    try:
        with pytest.raises(InvalidRequestError) as refused:
            read(stored)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert said in str(refused.value)
    assert len(str(refused.value)) < 300
    assert peak < 1500 * KIB, peak


def test_a_kilobyte_of_which_torch_makes_gigabytes_is_one_of_them():
    stored = as_torch(EXPANDED[: 10**7])
    assert len(stored) < 2 * KIB
    assert loaded(stored).shape == (10**7, 16)
    with pytest.raises(InvalidRequestError, match="expanded"):
        read(stored)


def test_a_large_tensor_is_not_copied():
    stored = np.frombuffer(as_torch(torch.zeros(20_000, 256)), np.uint8)
    tracemalloc.start()
    try:
        tensor = read_tensor(stored)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert np.shares_memory(tensor.rows(0, 20_000), stored)
    assert peak < 1500 * KIB, peak


def test_torch_is_not_imported():
    program = "import sys, trio_pool_serve.rendering.prompt_embeds; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
