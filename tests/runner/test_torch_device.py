"""Which type the model computes in, and that rows are float32 all the same."""

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.models.model_families import TEXTS, ServedModel
from trio_pool_serve.config import Dtype
from trio_pool_serve.errors import ModelLoadError
from trio_pool_serve.runner import cpu_features
from trio_pool_serve.runner.torch_device import resolve_device, resolve_dtype

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "auto"])
async def test_the_model_computes_in_the_type_asked_for_and_its_rows_are_of_unit_length_in_float32(
    minilm: Path, dtype: Dtype
):
    """They are normalised after they have left the model's type."""
    served, computed_in = ServedModel(minilm, dtype=dtype), resolve_dtype(dtype, CPU)
    assert {parameter.dtype for parameter in served.runner.loaded.backbone.model.parameters()} == {computed_in}
    assert f"{computed_in} on cpu".removeprefix("torch.") in str(served.runner.facts)
    rows, exact = await served.embed(TEXTS), await ServedModel(minilm).embed(TEXTS)
    assert {row.dtype for row in rows} == {np.dtype(np.float32)}
    assert np.linalg.norm(rows, axis=1) == pytest.approx(1, abs=1e-6)
    assert min(float(a @ b) for a, b in zip(rows, exact, strict=True)) >= 0.999


GPU = torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("name", "device", "native", "expected"),
    [
        ("auto", CPU, True, torch.bfloat16),
        ("auto", CPU, False, torch.float32),
        ("float32", CPU, True, torch.float32),
        ("bfloat16", CPU, False, torch.bfloat16),
        ("float16", CPU, True, torch.bfloat16),  # is for GPUs
        ("float16", CPU, False, torch.float32),
        ("float16", GPU, False, torch.float16),
        ("int8", CPU, True, torch.float32),  # quantised later
    ],
)
def test_each_name_has_its_type(
    monkeypatch: pytest.MonkeyPatch, name: Dtype, device: torch.device, native: bool, expected: torch.dtype
):
    monkeypatch.setattr(cpu_features, "_flags", lambda: frozenset({"avx2"} | ({"amx_tile"} if native else set())))
    assert resolve_dtype(name, device) == expected


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_auto_is_the_processor():
    assert resolve_device("auto") == resolve_device("cpu") == CPU


def test_a_device_that_is_not_there_is_an_error():
    with pytest.raises(ModelLoadError, match="CUDA devices are usable"):
        resolve_device("cuda:99")


@pytest.mark.parametrize(("capability", "is_accepted"), [((8, 0), False), ((8, 9), True), ((9, 0), True)])
def test_fp8_is_for_gpus_that_compute_it(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], *, is_accepted: bool
):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    if is_accepted:
        assert resolve_dtype("fp8", GPU) == torch.bfloat16
    else:
        with pytest.raises(
            ModelLoadError, match=r"--dtype fp8 .* 8\.9 or higher; cuda:0 has 8\.0\. Accepted there: auto"
        ):
            resolve_dtype("fp8", GPU)
    with pytest.raises(ModelLoadError, match=r"--dtype fp8 .* not for a CPU"):
        resolve_dtype("fp8", CPU)
