"""Rows with an adapter are what PEFT computes with it, whatever else the runner computes with beside them."""

import threading
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from peft import PeftModel
from safetensors.numpy import load_file, save_file
from transformers import AutoModelForSequenceClassification

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
from tests.models.model_families import TEXTS, ServedModel, edit_json, largest_difference, shuffled, write_family
from trio_pool_serve.errors import AdapterError
from trio_pool_serve.runner import adapter_store
from trio_pool_serve.types import Adapter, Batch, Classify, PoolingRequest

slow = pytest.mark.slow


@pytest.mark.parametrize(
    "name", ["bert", "qwen3", *(pytest.param(name, marks=slow) for name in LORA if name not in ("bert", "qwen3"))]
)
async def test_rows_of_each_adapter_are_those_of_peft(tmp_path: Path, record_agreement, name: str):
    base = write_family(tmp_path / "base", name)
    adapters = [None, *(write_lora(tmp_path / f"adapter-{seed}", base, seed, **LORA[name]) for seed in (1, 2))]
    ours = ServedModel(base)
    prompts = await ours.requests(TEXTS)
    rows = [replace(prompt, adapter=adapter) for adapter in adapters for prompt in prompts]
    expected = [vector for adapter in adapters for vector in vectors_by_peft(base, adapter, TEXTS)]
    assert largest_difference(expected[: len(TEXTS)], expected[len(TEXTS) : 2 * len(TEXTS)]) > 0.01

    found = [value for row in rows for ((value,),) in [await ours.runner.launch(Batch((row,)))]]
    difference = largest_difference(found, expected)
    for adapter in shuffled(adapters, seed=3):
        order = [index for index in shuffled(rows) if rows[index].adapter == adapters[adapter]]
        values = await ours.runner.launch(Batch(tuple(rows[index] for index in order)))
        difference = max(difference, largest_difference([value for (value,) in values], [expected[i] for i in order]))
    assert difference <= 1e-5
    record_agreement(f"{name}, adapter by request", "embed", "PEFT", difference)


CLASSIFIERS = ["bert", *(pytest.param(name, marks=slow) for name in ("roberta", "modernbert", "qwen3"))]


@pytest.mark.parametrize("name", CLASSIFIERS)
async def test_rows_of_a_classifier_with_an_adapter_are_those_of_peft(tmp_path: Path, record_agreement, name: str):
    """The adapter has a classifier of its own, which PEFT trains as a whole."""
    base = write_classifier(tmp_path / "base", name, num_labels=3)
    kind = "AutoModelForSequenceClassification"
    adapter = write_lora(tmp_path / "adapter", base, auto_class=kind, task_type="SEQ_CLS")
    theirs = AutoModelForSequenceClassification.from_pretrained(base)
    with warnings.catch_warnings(action="ignore", category=Warning):
        theirs = PeftModel.from_pretrained(theirs, adapter.folder).eval()
    ours = ServedModel(base)
    rows = await ours.requests(TEXTS[:4], Classify("raw"))
    with torch.inference_mode():
        expected = [theirs(torch.from_numpy(row.prompt.token_ids)[None]).logits[0].numpy() for row in rows]
    without = [value for (value,) in await ours.runner.launch(Batch(tuple(rows)))]
    assert largest_difference(without, expected) > 0.1
    found = await ours.runner.launch(Batch(tuple(replace(row, adapter=adapter) for row in rows)))
    difference = largest_difference([value for (value,) in found], expected)
    assert difference <= 1e-4
    record_agreement(f"{name}, adapter by request", "classify", "PEFT", difference)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return write_family(tmp_path / "base", "bert")


async def compute(ours: ServedModel, *adapters: Adapter | None) -> list[Any]:
    """Compute a text with each adapter."""
    (row,) = await ours.requests(TEXTS[:1])
    return [(await ours.runner.launch(Batch((replace(row, adapter=each),))))[0][0] for each in adapters]


async def test_threads_compute_with_the_adapter_of_their_own_batch(tmp_path: Path, base: Path):
    adapters = [None, *(write_lora(tmp_path / str(seed), base, seed) for seed in range(3))]
    ours = ServedModel(base)
    rows: list[PoolingRequest] = [
        replace(row, adapter=each) for each in adapters for row in await ours.requests(TEXTS[:3])
    ]
    expected = [ours.runner.launch(Batch((row,))).rows[0][0] for row in rows]
    wrong: list[int] = []

    def launch(seed: int) -> None:
        for index in shuffled(rows * 3, seed=seed):
            index %= len(rows)
            if not np.array_equal(ours.runner.launch(Batch((rows[index],))).rows[0][0], expected[index]):
                wrong.append(index)

    threads = [threading.Thread(target=launch, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


async def test_the_least_recently_used_adapters_leave_memory(tmp_path: Path, base: Path, monkeypatch):
    adapters = [write_lora(tmp_path / str(seed), base, seed) for seed in range(3)]
    ours = ServedModel(base)
    monkeypatch.setattr(adapter_store, "MAX_LOADED", 2)
    first = await compute(ours, *adapters)
    store = ours.runner.adapters.store
    assert store.loaded.values() == [store.get(each) for each in adapters[1:]]
    assert all(map(np.array_equal, await compute(ours, *adapters), first))
    monkeypatch.setattr(adapter_store, "MAX_BYTES", sum(each.nbytes for each in store.loaded.values()) - 1)
    await compute(ours, adapters[0])
    assert store.loaded.values() == [store.get(adapters[0])]


def other_rank(folder: Path, base: Path) -> Adapter:
    adapter = write_lora(folder, base, target_modules=["query"])
    edit_json(folder / "adapter_config.json", lambda config: config.update(r=3))
    return adapter


def changed(folder: Path, base: Path) -> Adapter:
    adapter = write_lora(folder, base, 1)
    write_lora(folder, base, 2)
    return adapter


def gone(folder: Path, base: Path) -> Adapter:
    adapter = write_lora(folder, base)
    folder.rename(folder.with_name("elsewhere"))
    return adapter


def twice(folder: Path, base: Path) -> Adapter:
    """A layer with an update and with weights of its own."""
    write_lora(folder, base, target_modules=["query"])
    tensors = load_file(folder / "adapter_model.safetensors")
    name = next(name for name in tensors if "query.lora_A" in name)
    whole = {name.replace("lora_A.weight", f"base_layer.{leaf}"): np.ones(shape, np.float32) for leaf, shape in SHAPES}
    save_file(tensors | whole, folder / "adapter_model.safetensors")
    return registered(folder)


SHAPES = ("weight", (32, 32)), ("bias", (32,))


@pytest.mark.parametrize(
    ("write", "said"),
    [
        (other_rank, r"lora_A \[4, 32\] .* r = 3"),
        (changed, "have changed since the adapter was registered"),
        (gone, "is not a folder on the machine that computes the model"),
        (of_a_wider_model, r"is for another model: its .*query is \(32, 40\), the model's \(32, 32\)"),
        (of_another_family, r"changes layers.[01].attn.Wqkv, a module that the model does not have"),
        (twice, "changes a module twice"),
        (
            of_the_first_layer,
            r"lacks updates for .*: encoder\.layer\.1\.attention\.self\.query\. .*layers_to_transform",
        ),
        (of_a_norm, "replaces all of embeddings.LayerNorm; .*only linear layers can be replaced"),
    ],
)
async def test_an_adapter_that_does_not_fit_is_refused_and_changes_nothing(
    tmp_path: Path, base: Path, write, said: str
):
    adapter, ours = write(tmp_path / "adapter", base), ServedModel(base)
    before = await compute(ours, None)
    with pytest.raises(AdapterError, match=said):
        await compute(ours, adapter)
    assert np.array_equal(await compute(ours, None), before)


async def test_an_adapter_of_some_layers_is_applied_if_its_config_names_them(tmp_path: Path, base: Path):
    ours = ServedModel(base)
    adapter = write_lora(tmp_path / "adapter", base, target_modules=["query"], layers_to_transform=[0])
    assert largest_difference(await compute(ours, adapter), vectors_by_peft(base, adapter, TEXTS[:1])) <= 1e-5


async def test_an_adapter_that_cannot_be_applied_is_not_read_for_every_batch(tmp_path: Path, base: Path, monkeypatch):
    """Other rows wait while it is read. Once its files are right again, it is computed after a while."""
    adapter, ours = changed(tmp_path / "adapter", base), ServedModel(base)
    store, now, read = ours.runner.adapters.store, [0.0], []

    def reading(folder: Path, read_files=store.read) -> Any:
        read.append(folder)
        now[0] += 1.0
        return read_files(folder)

    store.read = reading
    monkeypatch.setattr(adapter_store, "monotonic", lambda: now[0])
    for _ in range(3):
        with pytest.raises(AdapterError, match="have changed since"):
            await compute(ours, adapter)
    assert len(read) == 1
    assert write_lora(tmp_path / "adapter", base, 1) == adapter
    now[0] += 1.0 / adapter_store.READING_SHARE - 1.0
    with pytest.raises(AdapterError, match="have changed since"):
        await compute(ours, adapter)
    now[0] += 1.0
    assert largest_difference(await compute(ours, adapter), await compute(ours, None)) > 0.01
    assert len(read) == 2
