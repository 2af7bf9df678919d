"""A server with a model of every kind that the console has a view for, and a browser."""

import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from tests.console.visit import TIMEOUT_MS, Visit
from tests.cpu_backend import BY_TORCH_FLAGS
from tests.debian_programs import CHROMIUM_FLAGS, debian_program
from tests.model_folders import write_json
from tests.server.server_process import serving

expect.set_options(timeout=TIMEOUT_MS)

IN_ONE_PROCESS = (sys.executable, "-m", "trio_pool_serve", "serve", "--engine", "local")
HOSTILE = "<script>window.hacked = 1</script>"
"""The name of a label, and in texts."""

HOSTILE_NAME = "<script>hack()</script>"
"""The name of a model."""


@pytest.fixture(scope="package")
def models(minilm: Path, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    from tests.models.classifier_families import write_classifier
    from tests.models.retrieval_families import pylate_bert, splade_max
    from tests.models.vision_families import clip

    root = tmp_path_factory.mktemp("models")
    shutil.copytree(minilm, root / "minilm")
    prompts = {"prompts": {"query": "query: ", "document": "passage: "}}
    write_json(root / "minilm" / "config_sentence_transformers.json", prompts)
    labels = {0: "calm", 1: "glad", 2: HOSTILE}
    classes = {0: "O", 1: "B-PER", 2: "I-PER", 3: "B-LOC", 4: "I-LOC"}
    classifier = write_classifier(root / "classifier", "roberta", id2label=labels)
    return {
        "minilm": root / "minilm",
        "reranker": write_classifier(root / "reranker", "bert", num_labels=1),
        "colbert": pylate_bert(root / "colbert"),
        "splade": splade_max(root / "splade"),
        "classifier": classifier,
        HOSTILE_NAME: classifier,
        "tagger": write_classifier(root / "tagger", "bert", head="TokenClassification", id2label=classes),
        "clip": clip(root / "clip"),
    }


@pytest.fixture(scope="package")
def server_url(models: Mapping[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server of all models."""
    named = [f"{name}={path}" for name, path in models.items()]
    flags = ("--dtype", "float32", *BY_TORCH_FLAGS)
    with serving(tmp_path_factory.mktemp("server"), *named, *flags, command=IN_ONE_PROCESS) as server:
        yield server.url


@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    chromium = debian_program("chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=CHROMIUM_FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def visit(browser: Browser) -> Iterator[Callable[..., Page]]:
    """Open pages; in the end there must be no error in any console, and no request to another origin."""
    with ExitStack() as stack:
        yield lambda url, *path, **options: stack.enter_context(Visit(browser, url, *path, **options))
