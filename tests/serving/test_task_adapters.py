"""A model with adapters for its tasks: the request's task selects one, and its prompt."""

import itertools
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from attrs import evolve
from peft import PeftModel

from tests.conftest import client_of, listening, running
from tests.model_folders import write_json
from tests.models.adapter_folders import write_adapter
from tests.models.lora_adapters import vectors_by_peft, write_lora
from tests.models.model_families import JINA_V5_TASKS, TEXTS, ServedModel, edit_json, write_family, write_jina_v5
from trio_pool_serve.checking.model_report import weights_of
from trio_pool_serve.config import Config, ModelConfig, ProcessesConfig
from trio_pool_serve.errors import ModelLoadError
from trio_pool_serve.models.files.joined_folder import ADAPTER
from trio_pool_serve.models.files.task_adapters import PROMPTS, of_task, read_task_adapters
from trio_pool_serve.models.folder import open_model_folder, read_model_folder
from trio_pool_serve.service import Service
from trio_pool_serve.types import Batch

TEXT = TEXTS[0]
QUERY, DOCUMENT = "q: ", "d: "
"""Those of the model's card are longer than the texts that a tiny model reads."""

ASKED: dict[str, tuple[dict[str, Any], str | None, str]] = {
    "no task": ({}, None, ""),
    "a query": ({"task": "retrieval.query"}, "retrieval_query", QUERY),
    "a passage": ({"task": "retrieval.passage"}, "retrieval_passage", DOCUMENT),
    "text-matching": ({"task": "text-matching"}, "text_matching", ""),
    "classification": ({"task": "classification"}, "classification", ""),
    "separation": ({"task": "separation"}, "separation", ""),
    "a query by Voyage's name": ({"input_type": "query"}, "retrieval_query", QUERY),
    "a document by the prompt's name": ({"prompt_name": "document"}, "retrieval_passage", DOCUMENT),
    "a prompt beside a type": ({"prompt_name": "document", "input_type": "query"}, "retrieval_passage", DOCUMENT),
    "a prompt beside a task": ({"prompt_name": "document", "task": "retrieval.query"}, "retrieval_query", DOCUMENT),
    "an own prompt": ({"task": "retrieval.query", "prompt": "find "}, "retrieval_query", "find "),
    "vLLM's task of the route": ({"task": "embed"}, None, ""),
}
"""Fields, the adapter's folder, and the prompt."""


def config_of(folder: Path) -> Config:
    # Without --backend: adapters of its own make torch compute it.
    return Config(
        models=(f"jina={folder}",),
        loading=ModelConfig(device="cpu", dtype="float32"),
        processes=ProcessesConfig(engine="local"),
    )


def write_jina(folder: Path) -> Path:
    write_family(folder, "jina-embeddings-v3")
    write_json(folder / "config_sentence_transformers.json", {"prompts": {"query": QUERY, "document": DOCUMENT}})
    for seed, task in enumerate(
        ("retrieval_query", "retrieval_passage", "separation", "classification", "text_matching")
    ):
        write_lora(folder / task, folder, seed, target_modules=["query", "key", "value", "dense", "word_embeddings"])
    return folder


WRONG_TASKS = ("nothing", "code.query", "retrieval-query", "RETRIEVAL.QUERY", "retrieval.qurey", "separation.x")
"""Each without an adapter of exactly that name."""


async def test_the_task_selects_the_adapter_and_its_prompt(tmp_path: Path, record_agreement):
    folder = write_jina(tmp_path / "jina")
    largest = 0.0
    service = Service(config_of(folder))
    async with running(service), listening(service) as url, client_of(url) as client:
        for fields, task, prompt in ASKED.values():
            (expected,) = vectors_by_peft(folder, None if task is None else folder / task, [TEXT], prompt=prompt)
            answer = await client.post("/v1/embeddings", json={"input": TEXT, **fields})
            found = np.array(answer.json()["data"][0]["embedding"], np.float32)
            largest = max(largest, float(np.abs(found - expected).max()))
        assert largest <= 1e-5
        scores = await client.post("/score", json={"text_1": TEXT, "text_2": TEXT})
        sides = [
            vectors_by_peft(folder, folder / task, [TEXT], prompt=prompt)[0]
            for task, prompt in (("retrieval_query", QUERY), ("retrieval_passage", DOCUMENT))
        ]
        assert scores.json()["data"][0]["score"] == pytest.approx(float(sides[0] @ sides[1]), abs=1e-5)
        for field, value in itertools.product(("task", "input_type"), WRONG_TASKS):
            refused = await client.post("/v1/embeddings", json={"input": TEXT, field: value})
            assert refused.status_code == 400
            assert "retrieval.passage, retrieval.query, search_document" in refused.json()["error"]["message"]
    record_agreement("jina-embeddings-v3, adapter by task", "embed", "PEFT", largest)


ASKED_OF_V5: dict[str, tuple[dict[str, Any], str, str]] = {
    "nothing": ({}, "retrieval", DOCUMENT),
    "a query": ({"task": "retrieval.query"}, "retrieval", QUERY),
    "a passage": ({"task": "retrieval.passage"}, "retrieval", DOCUMENT),
    "a query by Voyage's name": ({"input_type": "query"}, "retrieval", QUERY),
    "another task": ({"task": "clustering"}, "clustering", DOCUMENT),
    "a task and a prompt": ({"task": "text-matching", "prompt_name": "query"}, "text-matching", QUERY),
    "Cohere's type": ({"input_type": "classification"}, "classification", DOCUMENT),
}
"""Fields, the adapter's folder, and the prompt: as the published code, which refuses requests without a task."""


def as_published(base: Path, adapter: Path, texts: Sequence[str]) -> np.ndarray:
    """Return what the published module computes of texts with their prompts: ``custom_st.py``, with PEFT's model."""
    with warnings.catch_warnings(action="ignore", category=Warning):
        model: Any = PeftModel.from_pretrained(transformers.AutoModel.from_pretrained(base), adapter).eval()
    longest = model.config.max_position_embeddings
    tokenizer = transformers.AutoTokenizer.from_pretrained(base, padding_side="right")
    batch = tokenizer(list(texts), max_length=longest, truncation=True, padding=True, return_tensors="pt")
    batch.pop("token_type_ids", None)
    with torch.no_grad():
        states = model(**batch).last_hidden_state
    last = states[torch.arange(len(texts)), batch["attention_mask"].sum(dim=1) - 1]
    return torch.nn.functional.normalize(last, dim=-1).numpy()


async def test_jina_v5_has_an_adapter_for_each_task_and_pools_as_its_own_code(tmp_path: Path, record_agreement):
    oracles = {}
    for name in ("qwen3", "eurobert"):
        oracles[name] = write_jina_v5(tmp_path / f"{name}_oracle", name, as_published=False)
        folder = write_jina_v5(tmp_path / name, name, {"query": QUERY, "document": DOCUMENT})
        for seed, task in enumerate(JINA_V5_TASKS):
            write_lora(folder / "adapters" / task, oracles[name], seed, init_lora_weights="gaussian")
    models = tuple(f"{name}={tmp_path / name}" for name in oracles)
    service = Service(evolve(config_of(tmp_path / "qwen3"), models=models))
    async with running(service), listening(service) as url, client_of(url) as client:
        for name, oracle in oracles.items():
            largest = 0.0
            for fields, task, prompt in ASKED_OF_V5.values():
                expected = as_published(oracle, tmp_path / name / "adapters" / task, [prompt + text for text in TEXTS])
                body = {"model": name, "input": [*TEXTS], "truncate": True, **fields}
                answer = await client.post("/v1/embeddings", json=body)
                found = np.array([row["embedding"] for row in answer.json()["data"]], np.float32)
                largest = max(largest, float(np.abs(found - expected).max()))
            assert largest <= 1e-5
            refused = await client.post("/v1/embeddings", json={"model": name, "input": TEXT, "task": "separation"})
            assert refused.status_code == 400
            record_agreement(f"jina-embeddings-v5 ({name}), adapter by task", "embed", "PEFT", largest)


def with_adapters(folder: Path) -> Path:
    for task in JINA_V5_TASKS:
        write_adapter(folder / "adapters" / task)
    return folder


async def test_the_code_of_jina_v5_is_not_run_even_if_it_is_trusted(tmp_path: Path):
    """The folder has none of the files that its ``auto_map`` names."""
    folder = with_adapters(write_jina_v5(tmp_path / "jina", "qwen3"))
    ours = ServedModel(folder, settings={"trust_remote_code": True})
    (expected,) = vectors_by_peft(write_jina_v5(tmp_path / "oracle", "qwen3", as_published=False), None, [TEXT])
    [(found,)] = await ours.runner.launch(Batch(tuple(await ours.requests([TEXT]))))
    assert float(np.abs(found - expected).max()) <= 1e-5


def test_a_folder_without_prompts_has_those_of_the_model_s_card(tmp_path: Path):
    folder = write_jina(tmp_path / "jina")
    (folder / "config_sentence_transformers.json").unlink()
    assert read_model_folder(folder).prompts == PROMPTS["jina_embeddings_v3"]
    for place in folder.glob("*/adapter_config.json"):
        place.unlink()
    assert read_model_folder(folder).prompts == {}, "they are the adapters' prompts"


@pytest.mark.parametrize(
    ("task", "folder"),
    [
        ("retrieval.query", "adapters/retrieval"),
        ("retrieval", "adapters/retrieval"),
        ("text-matching", "adapters/text-matching"),
        ("Text-Matching", None),
        ("retrieval.x", None),
        ("code.query", None),
        ("matching", None),
        (None, None),
    ],
)
def test_adapters_below_one_folder_are_named_by_task(tmp_path: Path, task: str | None, folder: str | None):
    for name in ("retrieval", "text-matching", "clustering"):
        write_adapter(tmp_path / "adapters" / name)
    write_adapter(tmp_path / "elsewhere")
    found = of_task(read_task_adapters(tmp_path, {"model_type": "qwen3"}), task)
    assert found == (None if folder is None else tmp_path / folder)


def test_an_adapter_that_is_merged_is_not_one_of_a_task(tmp_path: Path):
    for name in ("separation", ADAPTER):
        write_adapter(tmp_path / name)
    assert read_task_adapters(tmp_path, {"model_type": "jina_embeddings_v3"}) == {"separation": tmp_path / "separation"}


def test_jina_v5_without_one_of_its_adapters_is_refused(tmp_path: Path):
    folder = with_adapters(write_jina_v5(tmp_path / "jina", "qwen3"))
    for task in ("retrieval", "clustering"):
        (folder / "adapters" / task / "adapter_config.json").unlink()
    with pytest.raises(ModelLoadError, match=r"lacks adapters for tasks of config.json: retrieval, clustering\."):
        read_model_folder(folder)


@pytest.mark.parametrize("has_listing", [True, False])
def test_the_modules_of_jina_v5_are_known(tmp_path: Path, has_listing: bool):
    folder = with_adapters(write_jina_v5(tmp_path / "jina", "qwen3"))
    edit_json(folder / "config_sentence_transformers.json", lambda config: config.update(truncate_dim=8))
    if not has_listing:
        (folder / "modules.json").unlink()
    modules = read_model_folder(folder).spec.modules
    assert [module.name for module in modules] == ["Pooling", "Normalize", "Truncate"]
    edit_json(folder / "config.json", lambda config: config.update(model_type="qwen3"))
    if has_listing:
        with pytest.raises(ModelLoadError, match=r"custom_st.Transformer is not one of sentence-transformers' own"):
            read_model_folder(folder)


def test_a_merged_adapter_is_the_only_one(tmp_path: Path):
    base = with_adapters(write_jina_v5(tmp_path / "jina", "qwen3"))
    assert read_model_folder(base).task_adapters.keys() == {*JINA_V5_TASKS}
    merged = open_model_folder(str(base / "adapters" / "clustering"), ModelConfig(adapter_base=str(base)))
    assert (merged.task_adapters, merged.default_prompt_name) == ({}, "document")
    said = [weights_of(folder, ModelConfig(adapter_base="base")) for folder in (read_model_folder(base), merged)]
    every = "classification, clustering, retrieval, text-matching"
    assert said == [f"its checkpoint, and LoRA adapters for {every}", "LoRA adapter on base"]


def test_two_adapters_of_one_task_are_refused(tmp_path: Path):
    for name in ("retrieval.query", "retrieval_query"):
        write_adapter(tmp_path / "adapters" / name)
    with pytest.raises(ModelLoadError, match=r"two adapters for one task: \['retrieval.query', 'retrieval_query'\]"):
        read_task_adapters(tmp_path, {"model_type": "qwen3"})


async def test_an_adapter_of_a_task_that_does_not_fit_is_refused_at_load(tmp_path: Path):
    folder = write_jina(tmp_path / "jina")
    edit_json(folder / "separation" / "adapter_config.json", lambda config: config.update(r=3))
    with pytest.raises(ModelLoadError, match=r"the adapter separation: .*with r = 3"):
        await Service(config_of(folder)).run()
