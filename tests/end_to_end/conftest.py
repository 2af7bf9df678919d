"""Real servers that the tests of client libraries share, and what their answers are compared with."""

import os

# Nobody is told that these tests run; the libraries read these when they are imported.
os.environ.update(HF_HUB_DISABLE_TELEMETRY="1", HAYSTACK_TELEMETRY_ENABLED="False", LANGSMITH_TRACING="false")

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.texts import API_KEY
from tests.process.server_process import serving
from tests.runner.classifier_families import cross_encoder, write_classifier
from tests.runner.retrieval_families import pylate_bert, splade_max

LABELS = {0: "calm", 1: "glad", 2: "cross"}


@pytest.fixture(scope="session")
def folders(minilm: Path, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """A model of every kind."""
    root = tmp_path_factory.mktemp("models")
    return {
        "minilm": minilm,
        "reranker": write_classifier(root / "reranker", "bert", num_labels=1),
        "classifier": write_classifier(root / "classifier", "roberta", id2label=LABELS),
        "splade": splade_max(root / "splade"),
        "colbert": pylate_bert(root / "colbert"),
    }


@pytest.fixture(scope="package")
def server_url(folders: Mapping[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a server of all models; who names none gets MiniLM."""
    models = [f"{name}={path}" for name, path in folders.items()]
    with serving(tmp_path_factory.mktemp("server"), *models, "--dtype", "float32", "--api-key", API_KEY) as server:
        yield server.url


def _serving_one(folders: Mapping[str, Path], name: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    model = f"{name}={folders[name]}"
    with serving(tmp_path_factory.mktemp(name), model, "--dtype", "float32", "--api-key", API_KEY) as server:
        yield server.url


@pytest.fixture(scope="package")
def reranker_url(folders: Mapping[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a server of a reranker alone, for clients that cannot name a model; and so the next ones."""
    yield from _serving_one(folders, "reranker", tmp_path_factory)


@pytest.fixture(scope="package")
def classifier_url(folders: Mapping[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    yield from _serving_one(folders, "classifier", tmp_path_factory)


@pytest.fixture(scope="package")
def splade_url(folders: Mapping[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    yield from _serving_one(folders, "splade", tmp_path_factory)


# -- oracles --------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def sentence_transformer(minilm: Path) -> Any:
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(str(minilm), device="cpu")


@pytest.fixture(scope="session")
def reranking_oracle(folders: Mapping[str, Path]) -> Any:
    return cross_encoder(folders["reranker"])


@pytest.fixture(scope="session")
def classification_oracle(folders: Mapping[str, Path]) -> Any:
    from transformers import pipeline

    return pipeline("text-classification", model=str(folders["classifier"]), top_k=None, device="cpu")


@pytest.fixture(scope="session")
def sparse_oracle(folders: Mapping[str, Path]) -> Any:
    from sentence_transformers import SparseEncoder

    return SparseEncoder(str(folders["splade"]), device="cpu")
