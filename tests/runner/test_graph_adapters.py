"""By OpenVINO, rows with an adapter are what PEFT computes with it, and what a graph of the merged weights computes."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from safetensors.numpy import load_file, save_file

from tests.models.classifier_families import write_classifier
from tests.models.lora_adapters import (
    LORA,
    of_a_norm,
    of_a_wider_model,
    of_another_family,
    of_the_first_layer,
    registered,
    vectors_by_peft,
    write_lora,
)
from tests.models.model_families import TEXTS, ServedModel, largest_difference, shuffled, write_family
from trio_pool_serve.errors import AdapterError
from trio_pool_serve.runner.cpu_features import has_native_bfloat16
from trio_pool_serve.runner.openvino import graph_adapters
from trio_pool_serve.runner.openvino.openvino_runner import OpenVinoRunner
from trio_pool_serve.types import Adapter, Batch, Classify, PooledValue, PoolingRequest

pytest.importorskip("openvino")

slow = pytest.mark.slow
BY_OPENVINO = {"backend": "openvino", "cache_dir": ""}

RANKS = {"xlm-roberta": {"rank_pattern": {"query": 2}}}
LORAS: dict[str, dict[str, Any]] = {name: LORA[name] for name in LORA if name != "roberta"} | RANKS


def values(runner: Any, *rows: PoolingRequest) -> list[PooledValue]:
    return [value for (value,) in runner.launch(Batch(rows)).rows]


@pytest.mark.parametrize(
    "name",
    [name if name in ("bert", "modernbert", "qwen3") else pytest.param(name, marks=slow) for name in LORAS],
)
async def test_rows_of_each_adapter_are_those_of_peft(tmp_path: Path, record_agreement, name: str):
    base = write_family(tmp_path / "base", name)
    adapters = [None, *(write_lora(tmp_path / f"a{seed}", base, seed, r=seed, **LORAS[name]) for seed in (2, 3))]
    ours = ServedModel(base, settings=BY_OPENVINO)
    assert isinstance(ours.runner, OpenVinoRunner)
    prompts = await ours.requests(TEXTS)
    expected = [vectors_by_peft(base, adapter, TEXTS) for adapter in adapters]
    assert largest_difference(expected[0], expected[1]) > 0.01
    in_float32 = [vectors_by_peft(base, adapter, TEXTS, torch.float32) for adapter in adapters]
    rounding = max(map(largest_difference, in_float32, expected))  # 1.4e-5 with some adapters and processors
    difference = 0.0
    for adapter, vectors in [*zip(adapters, expected, strict=True)] * 2:
        rows = [replace(prompt, adapter=adapter) for prompt in prompts]
        order = shuffled(rows)
        together = values(ours.runner, *(rows[index] for index in order))
        alone = [value for row in rows for value in values(ours.runner, row)]
        difference = max(
            difference,
            largest_difference(alone, vectors),
            largest_difference(together, [vectors[index] for index in order]),
        )
    assert difference <= max(1e-5, 3 * rounding), "as exact as PEFT"
    assert len(ours.runner.adapters._programs.values()) == 1, "ranks may differ in one program"
    record_agreement(f"{name}, adapter by request, OpenVINO", "embed", "PEFT", difference)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return write_family(tmp_path / "base", "bert")


async def by_adapter(ours: ServedModel, adapters: Sequence[Adapter | None], texts: Sequence[str] = TEXTS) -> list[Any]:
    """Return the values of texts with each adapter."""
    rows = await ours.requests(texts)
    return [values(ours.runner, *(replace(row, adapter=each) for row in rows)) for each in adapters]


@pytest.mark.skipif(not has_native_bfloat16(), reason="this CPU does not compute bfloat16")
async def test_in_bfloat16_rows_of_an_adapter_are_near_those_in_float32(tmp_path: Path, base: Path):
    adapter = write_lora(tmp_path / "adapter", base, target_modules=["query", "value", "word_embeddings"])
    ours = ServedModel(base, dtype="bfloat16", settings=BY_OPENVINO)
    (found,) = await by_adapter(ours, [adapter])
    for vector, exact in zip(found, vectors_by_peft(base, adapter, TEXTS), strict=True):
        assert 0.99 < vector @ exact < 1 - 1e-7


@slow
async def test_in_int8_rows_of_an_adapter_are_as_near_as_those_of_the_base(tmp_path: Path, base: Path):
    """The update is computed of what the layer is given before it is scaled and rounded."""
    adapter = weakened(write_lora(tmp_path / "adapter", base, target_modules=["query", "value", "dense"]), 0.2)
    ours = ServedModel(base, dtype="int8", settings=BY_OPENVINO)
    found, plain = await by_adapter(ours, [adapter, None])
    expected, without = vectors_by_peft(base, adapter, TEXTS), vectors_by_peft(base, None, TEXTS)
    assert cosine(without, expected) < 0.95
    assert cosine(found, expected) > cosine(plain, without) - 0.01


def weakened(adapter: Adapter, factor: float) -> Adapter:
    file = Path(adapter.folder) / "adapter_model.safetensors"
    tensors = {name: each * np.float32(factor if "lora_B" in name else 1) for name, each in load_file(file).items()}
    save_file(tensors, file)
    return registered(file.parent)


def cosine(ours: Sequence[Any], expected: Sequence[Any]) -> float:
    """The mean, of vectors of unit length."""
    return float(np.mean([a @ b for a, b in zip(ours, expected, strict=True)]))


async def test_threads_share_programs_of_few_sets_of_modules(
    tmp_path: Path, base: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(graph_adapters, "MAX_PROGRAMS", 2)
    targets = ["query", "key", "value"]
    adapters = [None, *(write_lora(tmp_path / name, base, target_modules=[name]) for name in targets)]
    ours = ServedModel(base, settings=BY_OPENVINO)
    expected = await by_adapter(ours, adapters)
    of_sets = ours.runner.adapters._programs
    assert len(of_sets.values()) == 2
    rows = await ours.requests(TEXTS)

    def compute(number: int) -> bool:
        adapter = adapters[number % 4]
        found = values(ours.runner, *(replace(row, adapter=adapter) for row in rows))
        ours.runner.return_memory()
        return largest_difference(found, expected[number % 4]) < 1e-6

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(compute, range(24)))
    assert len(of_sets.values()) == 2


@pytest.mark.parametrize(
    ("write", "said"),
    [
        (of_a_wider_model, r"is for another model: its .*query is \(32, 40\), the model's \(32, 32\)"),
        (of_another_family, r"changes layers.0.attn.Wqkv, layers.1.attn.Wqkv, which OpenVINO's graph .* does not have"),
        (
            of_the_first_layer,
            r"lacks updates for .*: encoder\.layer\.1\.attention\.self\.query\. .*layers_to_transform",
        ),
        (of_a_norm, "changes embeddings.LayerNorm, which .* --backend torch"),
    ],
)
async def test_an_adapter_that_does_not_fit_is_refused_and_changes_nothing(
    tmp_path: Path, base: Path, write: Any, said: str
):
    adapter, ours = write(tmp_path / "adapter", base), ServedModel(base, settings=BY_OPENVINO)
    (before,) = await by_adapter(ours, [None])
    with pytest.raises(AdapterError, match=said):
        await by_adapter(ours, [adapter])
    (after,) = await by_adapter(ours, [None])
    assert all(map(np.array_equal, before, after))


async def test_constants_that_an_adapter_would_change_are_not_overlooked(tmp_path: Path):
    """DeBERTa applies its query layers to positions, too, which the conversion computes once and for all."""
    base = write_classifier(tmp_path / "base", "deberta-v2", num_labels=2)
    adapter = write_lora(tmp_path / "adapter", base, target_modules=["query_proj"])
    ours = ServedModel(base, settings=BY_OPENVINO)
    row = replace((await ours.requests(TEXTS[:1], Classify("raw")))[0], adapter=adapter)
    with pytest.raises(AdapterError, match=r"changes .*layer.0.attention.self.query_proj"):
        values(ours.runner, row)


async def test_torch_computes_a_model_with_an_adapter_that_openvino_cannot_apply(tmp_path: Path):
    """The adapter has a classifier of its own."""
    base = write_classifier(tmp_path / "base", "bert", num_labels=3)
    kind = "AutoModelForSequenceClassification"
    whole = write_lora(tmp_path / "whole", base, auto_class=kind, task_type="SEQ_CLS")
    part = write_lora(tmp_path / "part", base, auto_class=kind, target_modules=["query"])
    for adapter, backend in ((part, "openvino"), (whole, "torch")):
        settings = {"backend": "auto", "cache_dir": "", "adapter": (f"a={adapter.folder}",)}
        ours = ServedModel(base, settings=settings)
        assert (backend == "openvino") == isinstance(ours.runner, OpenVinoRunner), str(ours.runner.facts)
        (row,) = await ours.requests(TEXTS[:1], Classify("raw"))
        assert largest_difference(values(ours.runner, row), values(ours.runner, replace(row, adapter=adapter))) > 0.01
