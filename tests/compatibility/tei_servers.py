"""A server of each kind of model that TEI serves, and what transformers computes with the same folders."""

import re
import shlex
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import numpy.typing as npt
import torch
import transformers
from anyio.from_thread import start_blocking_portal
from attrs import frozen

from tests.compatibility.worked_example import sections
from tests.conftest import NO_AUTHORITIES, listening, running
from tests.end_to_end.conftest import LABELS
from tests.end_to_end.texts import API_KEY
from tests.model_folders import write_json
from tests.models.classifier_families import write_classifier
from tests.models.model_families import pooling, write_family
from tests.models.retrieval_families import pylate_bert, splade_max
from tests.server.server_process import ROOT
from trio_pool_serve.cli import read_config
from trio_pool_serve.service import Service

Numbers = npt.NDArray[np.float32]

LONG = "a nursery owns its tasks and bread needs flour " * 20
"""Longer than any of the models takes."""
PROMPT = "query: "
"""The embedding model's prompt of the name ``query``."""


FLAGS = tuple(
    word
    for cell in re.findall(
        r"`(--[^`]+)`[^|`]*\|$", sections(ROOT / "docs" / "migrate-from-tei.md")["Deliberate differences"], flags=re.M
    )
    for word in shlex.split(cell)
)
"""Those that the page about TEI names for doing as TEI does."""


def write_folders(root: Path) -> dict[str, Path]:
    """Write a model of each kind. The embedding model has a default prompt, and vectors that have not unit length."""
    embedding = write_family(root / "embedding", "bert", modules=[pooling("mean")])
    prompts = {"prompts": {"query": PROMPT}, "default_prompt_name": "query"}
    write_json(embedding / "config_sentence_transformers.json", prompts)
    return {
        "embedding": embedding,
        "classifier": write_classifier(root / "classifier", "roberta", id2label=LABELS),
        "reranker": write_classifier(root / "reranker", "bert", num_labels=1),
        "splade": splade_max(root / "splade"),
        "colbert": pylate_bert(root / "colbert"),
    }


@frozen(eq=False)
class Oracle:
    """A folder's model, computed by transformers alone."""

    tokenizers: Mapping[str, Any]
    """By the side on which they truncate."""
    model: Any
    max_length: int

    def encoding(self, *texts: str, side: str = "Right", special: bool = True) -> Any:
        """Tokenize a text or a pair, truncated to the model's maximum."""
        return self.tokenizers[side](
            *texts, truncation=True, max_length=self.max_length, add_special_tokens=special, return_tensors="pt"
        )

    def ids(self, *texts: str, side: str = "Right") -> list[int]:
        return self.encoding(*texts, side=side)["input_ids"][0].tolist()

    def tokens(self, *texts: str, side: str = "Right") -> Numbers:
        """Return the last hidden states, [tokens, d]; for models with a head, the logits."""
        with torch.inference_mode():
            output = self.model(**self.encoding(*texts, side=side))
        return output[0][0].numpy()

    def vector(
        self, text: str, *, side: str = "Right", dimensions: int | None = None, normalize: bool = True
    ) -> Numbers:
        """Return the mean of the tokens, truncated and then scaled."""
        mean = self.tokens(text, side=side).mean(axis=0)[:dimensions]
        return mean / np.linalg.norm(mean) if normalize else mean

    def weights(self, text: str, *, side: str = "Right") -> Numbers:
        """Return SPLADE's weights over the vocabulary."""
        return np.log1p(np.maximum(self.tokens(text, side=side), 0)).max(axis=0)


CLASSES = {
    "embedding": transformers.AutoModel,
    "classifier": transformers.AutoModelForSequenceClassification,
    "reranker": transformers.AutoModelForSequenceClassification,
    "splade": transformers.AutoModelForMaskedLM,
}


@frozen(eq=False)
class Servers:
    """Servers of one model each, by its kind."""

    folders: Mapping[str, Path]
    scripted: Path
    """A folder without weights, for a scripted runner."""
    urls: Mapping[str, str]
    http: httpx.Client
    """Sends the API key."""
    stranger: httpx.Client
    """Sends none."""

    def post(self, kind: str, path: str, body: object) -> httpx.Response:
        return self.http.post(self.urls[kind] + path, json=body)

    def get(self, kind: str, path: str) -> httpx.Response:
        return self.http.get(self.urls[kind] + path)

    def ask(self, kind: str, path: str, **body: Any) -> Any:
        """Post a body and return the answer, which must be a success."""
        answer = self.post(kind, path, body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    @cache  # noqa: B019  (lives as long as the session does)
    def oracle(self, kind: str) -> Oracle:
        folder = str(self.folders[kind])
        tokenizers = {
            side: transformers.AutoTokenizer.from_pretrained(folder, truncation_side=side.lower())
            for side in ("Right", "Left")
        }
        model = CLASSES[kind].from_pretrained(folder, dtype=torch.float32).eval()
        return Oracle(tokenizers, model, self.get(kind, "/info").json()["max_input_length"])


@asynccontextmanager
async def _served(kind: str, path: Path, flags: Sequence[str]) -> AsyncIterator[str]:
    # --normalize is about embedding models; NAME is what the page calls a model's own name.
    flags = [flag.replace("NAME", kind) for flag in flags if flag != "--normalize" or kind == "embedding"]
    config = read_config([f"{kind}={path}", "--dtype", "float32", "--engine", "local", "--api-key", API_KEY, *flags])
    async with running(Service(config)) as service, listening(service) as url:
        yield url


@contextmanager
def serving_in_a_thread(kind: str, path: Path, flags: Sequence[str] = FLAGS) -> Iterator[str]:
    """Serve a model from an event loop in a thread of its own; gives the URL."""
    with start_blocking_portal("trio") as portal, portal.wrap_async_context_manager(_served(kind, path, flags)) as url:
        yield url


@contextmanager
def serving_each(folders: Mapping[str, Path], scripted: Path) -> Iterator[Servers]:
    """Serve each folder from a thread of its own."""
    with ExitStack() as stack:
        urls = {kind: stack.enter_context(serving_in_a_thread(kind, path)) for kind, path in folders.items()}
        headers = {"Authorization": f"Bearer {API_KEY}"}
        http = stack.enter_context(httpx.Client(headers=headers, timeout=60, verify=NO_AUTHORITIES))
        stranger = stack.enter_context(httpx.Client(timeout=60, verify=NO_AUTHORITIES))
        yield Servers(folders, scripted, urls, http, stranger)


def near(found: Any, expected: Any) -> None:
    """Assert that numbers are those that were expected, of the same shape."""
    found, expected = np.asarray(found, dtype=np.float32), np.asarray(expected, dtype=np.float32)
    assert found.shape == expected.shape
    np.testing.assert_allclose(found, expected, atol=2e-5)
