"""Real servers that the tests of client libraries share, and what their answers are compared with."""

import os

# No telemetry; the libraries read these when they are imported.
os.environ.update(HF_HUB_DISABLE_TELEMETRY="1", HAYSTACK_TELEMETRY_ENABLED="False", LANGSMITH_TRACING="false")

import gc
import sys
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from anyio.from_thread import start_blocking_portal

from tests.conftest import UNHURRIED, listening, running
from tests.cpu_backend import BY_TORCH
from tests.end_to_end.texts import A_FEW, API_KEY, QUERY
from tests.models.classifier_families import cross_encoder, write_classifier
from tests.models.retrieval_families import pylate_bert, splade_max
from trio_pool_serve.config import Config, KeyScope, ModelConfig, NetworkConfig
from trio_pool_serve.process_setup import SWITCH_INTERVAL_S
from trio_pool_serve.service import Service

LABELS = {0: "calm", 1: "glad", 2: "cross"}


@pytest.fixture
def switch_interval_of_servers() -> Iterator[None]:
    """The interpreter's thread switch interval as a server's process has it."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    yield
    sys.setswitchinterval(interval)


@pytest.fixture
def collected() -> Iterator[None]:
    """Close what a test has left open, before another test is blamed for it."""
    yield
    gc.collect()


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


@asynccontextmanager
async def _served(*models: str, scope: KeyScope, truncates: bool) -> AsyncIterator[str]:
    config = Config(
        models=models,
        loading=ModelConfig(dtype="float32", long_text="truncate" if truncates else None, **BY_TORCH),
        network=NetworkConfig(api_key=API_KEY, api_key_scope=scope),
        scheduling=UNHURRIED,
    )
    async with running(Service(config)) as service, listening(service) as url:
        yield url


@contextmanager
def serving_in_a_thread(*models: str, scope: KeyScope = "all", truncates: bool = False) -> Iterator[str]:
    """Serve models in float32 from an event loop in a thread of its own; gives the URL.

    To start a process for each would take half a minute, most of it for importing torch.
    """
    with (
        start_blocking_portal("trio") as portal,
        portal.wrap_async_context_manager(_served(*models, scope=scope, truncates=truncates)) as url,
    ):
        yield url


@pytest.fixture(scope="package")
def server_url(folders: Mapping[str, Path]) -> Iterator[str]:
    """The URL of a server of all models; MiniLM is the default."""
    with serving_in_a_thread(*(f"{name}={path}" for name, path in folders.items())) as url:
        yield url


@pytest.fixture(scope="package")
def reranker_url(folders: Mapping[str, Path]) -> Iterator[str]:
    """The URL of a server of a reranker alone, for clients that cannot name a model."""
    with serving_in_a_thread(f"reranker={folders['reranker']}") as url:
        yield url


@pytest.fixture
def invocations() -> Iterator[httpx.Client]:
    """A client that sends all POST requests to ``/invocations``, as behind SageMaker."""

    def move(request: httpx.Request) -> None:
        if request.method == "POST":
            request.url = request.url.copy_with(path="/invocations")

    with httpx.Client(event_hooks={"request": [move]}) as client:
        yield client


# -- oracles --------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def vectors(minilm: Path) -> Any:
    """MiniLM's vectors of A_FEW, as sentence-transformers computes them."""
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(str(minilm), device="cpu").encode(list(A_FEW))


@pytest.fixture(scope="session")
def scores(folders: Mapping[str, Path]) -> Any:
    """The reranker's scores of A_FEW for QUERY, as sentence-transformers computes them."""
    return cross_encoder(folders["reranker"]).predict([(QUERY, text) for text in A_FEW])


@pytest.fixture(scope="session")
def classes(folders: Mapping[str, Path]) -> list[list[dict[str, Any]]]:
    """The classifier's labels of A_FEW, best first, as transformers computes them."""
    from transformers import pipeline

    classify = pipeline("text-classification", model=str(folders["classifier"]), top_k=None, device="cpu")
    return classify(list(A_FEW))
