"""What an input gives depends on the batch that it rides in by rounding alone, and by no more than is stated."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.lanes import sampled
from tests.models.model_families import FAMILIES, TEXTS, ServedModel, write_family
from tests.runner.test_varlen import PACKED, serve_packed
from trio_pool_serve.types import Vectors

BOUNDS = {"float32": 1e-5, "bfloat16": 0.03}
"""Of a vector, relative to its length. Stated in docs/openvino.md."""

COMPANIES: Sequence[Sequence[str]] = ((), TEXTS, TEXTS[:2] * 8, (TEXTS[3],), ("Yes",) * 31)
"""None, all lengths, many of a few lengths, one that is longer than anything, many that are shorter."""


async def furthest(served: ServedModel) -> float:
    """By how much a text's vector changes at most with its company, relative to its length."""
    most = 0.0
    for text in TEXTS:
        vectors = [(await served.embed([*company, text]))[-1] for company in COMPANIES]
        most = max(most, *(relative(vector, vectors[0]) for vector in vectors[1:]))
    return most


def relative(vector: Vectors, alone: Vectors) -> float:
    return float(np.linalg.norm(vector - alone) / np.linalg.norm(alone))


@pytest.mark.parametrize("dtype", BOUNDS)
@sampled("name", FAMILIES, keep=["bert", "modernbert", "t5", "gemma3"])
async def test_company_changes_a_vector_by_no_more_than_the_bound(tmp_path: Path, name: str, dtype: Any):
    served = ServedModel(write_family(tmp_path / name, name), dtype=dtype)
    assert await furthest(served) <= BOUNDS[dtype]


@pytest.mark.parametrize("dtype", BOUNDS)
@sampled("name", PACKED, keep=["bert", "modernbert"])
async def test_without_padding_the_bound_is_the_same(tmp_path: Path, name: str, dtype: Any):
    served = serve_packed(ServedModel(write_family(tmp_path / name, name), dtype=dtype))
    assert await furthest(served) <= BOUNDS[dtype]


@pytest.mark.slow
async def test_by_openvino_the_bound_is_the_same(minilm: Path):
    pytest.importorskip("openvino")
    served = ServedModel(minilm, settings={"backend": "openvino", "cache_dir": ""})
    assert await furthest(served) <= BOUNDS["float32"]


@sampled("dtype", BOUNDS, keep=["float32"])
async def test_a_real_model_keeps_the_bound(minilm: Path, dtype: Any):
    assert await furthest(ServedModel(minilm, dtype=dtype)) <= BOUNDS[dtype]
