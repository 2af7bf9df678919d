"""Chunks of documents over HTTP against transformers: token states of the whole document, averaged over each chunk."""

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
import trio

from tests.conftest import wait_idle
from tests.end_to_end.folder_over_http import AskedFolder, farthest, one_of, serving_folder
from tests.models.model_families import HIDDEN, NEW_NORMALIZE, Module, dense, pooling, write_family, write_modules
from trio_pool_serve.types import Vectors

TOLERANCE = 1e-5

DOCUMENTS = {
    "English": ["Berlin is a city. ", "Its nights are long; ", "the city never sleeps."],
    "blanks at the beginning": ["Yes", " every task", "  has a parent", "\n\nand ends."],
    "one chunk": ["A nursery owns its tasks."],
    "emoji and combining characters": ["🙂 Nai\u0308ve cafe\u0301 ", "東京👩‍👩‍👧‍👦 ", "größer 🙂! ", "𝄞 e\u0301nd"],
}
SHORT = {
    "English": ["Yes ", "every task", " has a parent"],
    "emoji and combining characters": ["🙂 cafe\u0301 ", "東👩‍👩 ", "ö e\u0301nd"],
}
"""For models of at most 48 tokens, which are bytes for some."""

OVERLAPPING = [(0, 8), (4, 15), (6, 16), (0, 17), (9, 24)]
"""Of either English document; some of its characters are in none."""


def span_of(chunks: Sequence[str], number: int) -> tuple[int, int]:
    begin = len("".join(chunks[:number]))
    return begin, begin + len(chunks[number])


@cache
def oracle_of(path: Path) -> tuple[Any, Any]:
    model = transformers.AutoModel.from_pretrained(path, dtype=torch.float32).eval()
    return transformers.AutoTokenizer.from_pretrained(path), model


def reference(
    path: Path, text: str, spans: Sequence[tuple[int, int]], *, normalize: bool = True, instruction: str = ""
) -> Vectors:
    """The formula: a token is in the chunk of its first character other than a blank, special tokens at the ends."""
    tokenizer, model = oracle_of(path)
    inputs = tokenizer(
        instruction + text, return_tensors="pt", return_offsets_mapping=True, return_special_tokens_mask=True
    )
    offsets = inputs.pop("offset_mapping")[0].tolist()
    special = inputs.pop("special_tokens_mask")[0].tolist()
    with torch.no_grad():
        states = model(**inputs).last_hidden_state[0].numpy()
    whole = instruction + text
    places: list[int] = []
    for (begin, end), is_special in zip(offsets, special, strict=True):
        while begin < end - 1 and whole[begin].isspace():
            begin += 1
        if is_special:
            begin = -1 if not any(place >= 0 for place in places) else len(whole)
        places.append(begin - len(instruction))
    vectors = []
    for begin, end in spans:
        own = [
            begin <= place < end or (begin == 0 and place < 0) or (end == len(text) and place >= end)
            for place in places
        ]
        mean = states[np.array(own)].mean(axis=0)
        vectors.append(mean / np.linalg.norm(mean) if normalize else mean)
    return np.stack(vectors)


async def chunked(ours: AskedFolder, chunks: Sequence[str], **body: Any) -> Vectors:
    return await ours.embeddings(chunks, late_chunking=True, **body)


async def given_chunks(ours: AskedFolder, text: str, spans: Sequence[tuple[int, int]], **body: Any) -> Vectors:
    answer = await ours.post("/v1/embeddings", input=text, chunks=spans, **body)
    return np.array([item["embedding"] for item in answer["data"]], dtype=np.float32)


async def require_agreement(
    ours: AskedFolder, path: Path, documents: Mapping[str, Sequence[str]], *, normalizes: bool
) -> None:
    """Ask in both dialects for the chunks of all documents at the same time."""
    differences = {}

    async def ask(name: str, chunks: Sequence[str]) -> None:
        text, spans = "".join(chunks), [span_of(chunks, number) for number in range(len(chunks))]
        expected = reference(path, text, spans, normalize=normalizes)
        differences[name] = farthest(await chunked(ours, chunks), expected)
        differences[name, "chunks"] = farthest(await given_chunks(ours, text, spans), expected)

    async with trio.open_nursery() as clients:
        for name, chunks in documents.items():
            clients.start_soon(ask, name, chunks)
    assert len(differences) == 2 * len(documents)
    assert max(differences.values()) <= TOLERANCE, differences
    text = "".join(documents["English"])
    overlapping = await given_chunks(ours, text, OVERLAPPING)
    assert farthest(overlapping, reference(path, text, OVERLAPPING, normalize=normalizes)) <= TOLERANCE


@pytest.mark.parametrize("backend", ["torch", "openvino"])
@pytest.mark.parametrize(
    "name", one_of(["minilm", "bert", "xlm-roberta", "roberta", "modernbert", "qwen3"], "bert", "xlm-roberta")
)
async def test_chunks_agree_with_transformers(name: str, backend: str, minilm: Path, tmp_path: Path):
    if backend == "openvino":
        pytest.importorskip("openvino")
    path, documents = minilm, DOCUMENTS
    if name != "minilm":
        path, documents = write_family(tmp_path / name, name, modules=[pooling("mean")]), SHORT
    async with serving_folder(path, backend=backend, cache_dir="") as ours:
        await require_agreement(ours, path, documents, normalizes=name == "minilm")
        await wait_idle(ours.service)


async def test_one_chunk_has_the_vector_of_the_text(minilm: Path):
    text = "Every task has a parent, and every wait can be cancelled."
    async with serving_folder(minilm) as ours:
        expected = await ours.embeddings([text])
        assert farthest(await chunked(ours, [text]), expected) <= 1e-6
        assert farthest(await given_chunks(ours, text, [(0, len(text))]), expected) <= 1e-6
        for fields in ({"prompt": "query: "}, {"normalize": False}, {"dimensions": 5}, {"add_special_tokens": False}):
            assert farthest(await chunked(ours, [text], **fields), await ours.embeddings([text], **fields)) <= 1e-5


async def test_an_instruction_belongs_to_the_first_chunk(minilm: Path):
    chunks = DOCUMENTS["English"]
    spans = [span_of(chunks, number) for number in range(3)]
    expected = reference(minilm, "".join(chunks), spans, instruction="search for this: ")
    async with serving_folder(minilm) as ours:
        assert farthest(await chunked(ours, chunks, prompt="search for this: "), expected) <= TOLERANCE


async def test_an_instruction_that_is_not_pooled_belongs_to_no_chunk(tmp_path: Path):
    path = write_family(tmp_path / "model", "bert", modules=[pooling("mean", include_prompt=False)])
    async with serving_folder(path) as ours:
        prompted = {"prompt": "Every wait "}
        one = await ours.embeddings(["can be cancelled."], **prompted)
        assert farthest(await chunked(ours, ["can be cancelled."], **prompted), one) <= TOLERANCE


async def test_modules_after_pooling_are_applied_to_each_chunk(tmp_path: Path):
    path = write_family(tmp_path / "model", "bert", modules=[pooling("mean")])
    layer = dense(HIDDEN, 20)
    write_modules(path, [pooling("mean"), layer, Module(type=NEW_NORMALIZE)])
    chunks = DOCUMENTS["English"]
    means = reference(path, "".join(chunks), [span_of(chunks, number) for number in range(3)], normalize=False)
    rows = np.tanh(means @ layer.weights["linear.weight"].numpy().T + layer.weights["linear.bias"].numpy())
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    async with serving_folder(path) as ours:
        assert farthest(await chunked(ours, chunks), rows) <= TOLERANCE
