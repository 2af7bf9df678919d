"""Command lines of vLLM's documentation start this server, with small models in place of the documented ones.

They are from ``docs/models/pooling_models`` and ``examples/pooling`` of vLLM, which starts its examples by
``vllm serve MODEL --runner pooling``.
"""

import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
from attrs import evolve

from tests.model_folders import write_json
from tests.models.classifier_families import write_classifier
from tests.models.model_families import edit_json, write_family
from tests.models.retrieval_families import colbert_v2
from trio_pool_serve.cli import read_config
from trio_pool_serve.config import Config
from trio_pool_serve.process_setup import open_service

TEMPLATE = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}{% endfor %}"


def long_qwen(folder: Path) -> Path:
    path = write_family(folder, "qwen3")
    edit_json(path / "config.json", lambda config: config.update(max_position_embeddings=16384))
    write_json(path / "sentence_bert_config.json", {"max_seq_length": 16384})
    return path


def embeds(folder: Path) -> Path:
    return write_family(folder, "bert")


def reranks(folder: Path) -> Path:
    return write_classifier(folder, "xlm-roberta", num_labels=1)


def classifies(folder: Path) -> Path:
    return write_classifier(folder, "qwen2", num_labels=2)


def labels_tokens(folder: Path) -> Path:
    return write_classifier(folder, "bert", "TokenClassification")


LINES = {
    "intfloat/e5-small --runner pooling": (embeds, "embed"),
    "jinaai/jina-embeddings-v3 --runner pooling --trust-remote-code": (embeds, "embed"),
    """ssmits/Qwen2-7B-Instruct-embed-base --runner pooling --pooler-config '{"pooling_type": "MEAN"}'""": (
        long_qwen,
        "embed",
    ),
    "intfloat/e5-mistral-7b-instruct --runner pooling --convert embed": (long_qwen, "embed"),
    "TIGER-Lab/VLM2Vec-Full --runner pooling --trust-remote-code --max-model-len 4096 --chat-template T": (
        long_qwen,
        "embed",
    ),
    "MrLight/dse-qwen2-2b-mrl-v1 --runner pooling --trust-remote-code --max-model-len 8192 --chat-template T": (
        long_qwen,
        "embed",
    ),
    "answerdotai/answerai-colbert-small-v1 --runner pooling": (colbert_v2, "score"),
    "BAAI/bge-reranker-v2-m3 --runner pooling": (reranks, "score"),
    "BAAI/bge-reranker-base --runner pooling --dtype half": (reranks, "score"),
    "jason9693/Qwen2.5-1.5B-apeach --runner pooling": (classifies, "classify"),
    "boltuix/NeuroBERT-NER --runner pooling": (labels_tokens, "token_classify"),
}


def config_of(line: str, model: Path, template: Path) -> Config:
    """The settings of a line whose first word, the model, stands for a folder."""
    name, *words = [str(template) if word == "T" else word for word in shlex.split(line)]
    config = read_config([f"{name}={model}", *words, "--backend", "torch", "--cache-dir", ""])
    return evolve(config, processes=evolve(config.processes, engine="local"))


@pytest.mark.parametrize(("line", "served"), LINES.items(), ids=LINES)
async def test_a_line_of_vllm_s_documentation_starts(tmp_path: Path, line: str, served: tuple[Callable, str]):
    build, task = served
    (template := tmp_path / "template.jinja").write_text(TEMPLATE)
    async with open_service(config_of(line, build(tmp_path / "model"), template), niceness=None) as service:
        model = service.model(line.split()[0])
    assert task in model.folder.spec.tasks
    if "--max-model-len" in line:
        assert f"--max-model-len {model.folder.max_model_len} " in line
