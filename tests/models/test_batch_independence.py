"""What an input gives depends on the batch that it rides in by rounding alone, and by no more than is stated."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engine.engines import engine_over, running
from tests.lanes import sampled
from tests.models.model_families import FAMILIES, TEXTS, UNMASKED, ServedModel, edit_weights, write_family
from tests.runner.test_varlen import PACKED, serve_packed
from trio_pool_serve.engine.planned_window import PlannedWindow
from trio_pool_serve.runner import comparison
from trio_pool_serve.runner.batch_rows import ONE_LENGTH
from trio_pool_serve.types import Batch, Vectors

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


@sampled(
    ("name", "dtype"),
    [(name, dtype) for name in (*FAMILIES, *UNMASKED) for dtype in BOUNDS if (name, dtype) != ("fnet", "bfloat16")],
    keep=[
        *((name, dtype) for name in ("bert", "modernbert", "t5", "gemma3") for dtype in BOUNDS),
        *((name, "float32") for name in UNMASKED),
    ],
)
async def test_company_changes_a_vector_by_no_more_than_the_bound(tmp_path: Path, name: str, dtype: Any):
    """A family that does not mask padding is computed in rows of one length."""
    served = ServedModel(write_family(tmp_path / name, name), dtype=dtype)
    assert (ONE_LENGTH in str(served.runner.facts)) == (name in UNMASKED)
    assert await furthest(served) <= BOUNDS[dtype]


@pytest.mark.parametrize("name", UNMASKED)
async def test_so_it_is_by_openvino(tmp_path: Path, name: str):
    pytest.importorskip("openvino")
    folder = write_family(tmp_path / name, name)
    for _ in range(2):  # the second start reads what the first one found
        settings = {"backend": "openvino", "cache_dir": str(tmp_path / "cache")}
        served = ServedModel(folder, settings=settings)
        assert ONE_LENGTH in str(served.runner.facts)
        assert await furthest(served) <= BOUNDS["float32"]


@pytest.mark.parametrize("name", ["bert", "mobilebert"])
async def test_the_model_s_own_weights_decide(tmp_path: Path, name: str):
    """MobileBERT mixes neighbours, but the embedding of padding may be zero; a masked one may be anything."""
    folder = write_family(tmp_path / name, name)
    edit_weights(
        folder / "model.safetensors",
        lambda weights: weights["embeddings.word_embeddings.weight"][0].fill_(0.0 if name == "mobilebert" else 9.0),
    )
    served = ServedModel(folder)
    assert ONE_LENGTH not in str(served.runner.facts)
    assert await furthest(served) <= BOUNDS["float32"]


@pytest.mark.parametrize(("name", "rounds_only"), [("bert", True), ("convbert", False)])
def test_rounding_beyond_the_bound_is_not_taken_for_unmasked_padding(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch, *, rounds_only: bool
):
    """As in models of many layers."""
    monkeypatch.setattr(comparison, "ROUNDING", dict.fromkeys(comparison.ROUNDING, -1.0))
    described = str(ServedModel(write_family(tmp_path / name, name)).runner.facts)
    assert (ONE_LENGTH not in described) == rounds_only


@pytest.mark.parametrize("name", UNMASKED)
async def test_whatever_else_is_computed_a_row_of_an_engine_is_as_alone(tmp_path: Path, name: str):
    """In batches of the queue, and in planned batches of background work."""
    served = ServedModel(write_family(tmp_path / name, name))
    requests = await served.requests([TEXTS[1][:end] for end in range(1, 99, 6)])
    alone = [(await served.runner.launch(Batch((request,))))[0][0] for request in requests]
    async with running(engine_over(served.runner)) as engine:
        queued = [output.values[0] for output in await engine.submit_all(requests)]
        planned = [output.values[0] for output in await PlannedWindow(1).members[0].submit_all(engine, requests)]
        assert engine.statistics().batches < len({request.tokens for request in requests}), "lengths are mixed"
    assert max(map(relative, queued, alone)) <= BOUNDS["float32"]
    assert max(map(relative, planned, alone)) <= BOUNDS["float32"]


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
