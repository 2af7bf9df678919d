"""What a folder's small files say has the effect that it has in sentence-transformers, or is refused."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.end_to_end.folder_over_http import serving_folder
from tests.model_folders import write_json
from tests.models.classifier_families import cross_encoder, write_classifier
from tests.models.model_families import TEXTS, ServedModel, largest_difference, reference, write_family

TOLERANCE = 1e-5
LONG = [TEXTS[3], f"{TEXTS[1]} {TEXTS[6]}"]


def with_keys(path: Path, name: str, **keys: object) -> Path:
    """Change a file of a folder: set these keys, and leave those out that are None."""
    document = json.loads((path / name).read_text()) | keys
    write_json(path / name, {key: value for key, value in document.items() if value is not None})
    return path


@pytest.mark.parametrize(
    ("family", "own", "of_tokenizer", "expected"),
    [("bert", 40, 16, 40), ("roberta", 16, 40, 16), ("bert", None, 24, 24), ("roberta", 24, None, 24)],
)
async def test_lengths_agree(tmp_path: Path, family: str, own: int | None, of_tokenizer: int | None, expected: int):
    path = write_family(tmp_path / family, family)
    with_keys(path, "sentence_bert_config.json", max_seq_length=own)
    with_keys(path, "tokenizer_config.json", model_max_length=of_tokenizer)
    ours, theirs = ServedModel(path), reference(path)
    assert ours.folder.max_model_len == theirs.max_seq_length == expected
    assert largest_difference(await ours.embed(LONG), theirs.encode(LONG)) < TOLERANCE


async def test_truncate_dim_agrees(tmp_path: Path):
    path = with_keys(write_family(tmp_path / "bert", "bert"), "config_sentence_transformers.json", truncate_dim=12)
    texts, theirs = list(TEXTS), reference(path)
    async with serving_folder(path) as ours:
        response = await ours.client.post("/v1/embeddings", json={"input": texts, "truncate_prompt_tokens": -1})
        vectors = [row["embedding"] for row in response.json()["data"]]
        assert np.abs(np.array(vectors) - theirs.encode(texts)).max() < TOLERANCE
        assert len(vectors[0]) == 12
        pooled = await ours.client.post("/pooling", json={"input": texts, "truncate_prompt_tokens": -1})
        assert [row["data"] for row in pooled.json()["data"]] == vectors
        body = {"input": texts, "dimensions": 5, "truncate_prompt_tokens": -1}
        fewer = [row["embedding"] for row in (await ours.client.post("/v1/embeddings", json=body)).json()["data"]]
        assert np.abs(np.array(fewer) - theirs.encode(texts, truncate_dim=5)).max() < TOLERANCE
    normalized = ServedModel(path, settings={"normalize": True})
    theirs_normalized = theirs.encode(texts, normalize_embeddings=True)
    assert largest_difference(await normalized.embed(texts), theirs_normalized) < TOLERANCE


@pytest.mark.parametrize("place", ["tokenizer_config.json", "tokenizer.json"])
async def test_the_tokenizer_s_truncation_side_agrees(tmp_path: Path, place: str):
    path = write_family(tmp_path / "left", "bert")
    if place == "tokenizer_config.json":
        with_keys(path, place, truncation_side="left")
    else:
        truncation = {"direction": "Left", "max_length": 48, "strategy": "LongestFirst", "stride": 0}
        with_keys(path, place, truncation=truncation)
    theirs = reference(path)
    left = theirs.encode(LONG)
    theirs.tokenizer.truncation_side = "right"
    right = theirs.encode(LONG)
    assert np.abs(left - right).max() > 0.01
    async with serving_folder(path) as ours:

        async def embed(where: str = "/v1/embeddings", **more: object) -> Any:
            key = "inputs" if where == "/embed" else "input"
            response = await ours.client.post(where, json={key: LONG, **more})
            document = response.json()
            return np.array(document if where == "/embed" else [row["embedding"] for row in document["data"]])

        assert np.abs(await embed(truncate_prompt_tokens=-1) - left).max() < TOLERANCE
        assert np.abs(await embed(truncate_prompt_tokens=-1, truncation_side="right") - right).max() < TOLERANCE
        assert np.abs(await embed("/embed", truncate=True) - right).max() < TOLERANCE  # TEI's documented default


async def test_the_tokenizer_s_truncation_side_agrees_for_pairs(tmp_path: Path):
    path = write_classifier(tmp_path / "left", "bert", num_labels=1)
    with_keys(path, "tokenizer_config.json", truncation_side="left")
    scores = cross_encoder(path).predict([(LONG[1], text) for text in LONG])
    async with serving_folder(path) as ours:

        async def ask(where: str, **body: object) -> list[dict[str, Any]]:
            response = await ours.client.post(where, json=body | {"truncate_prompt_tokens": -1})
            rows: list[dict[str, Any]] = response.json()["data"]
            return rows

        rows = await ask("/score", text_1=LONG[1], text_2=LONG)
        assert np.abs(np.array([row["score"] for row in rows]) - scores).max() < TOLERANCE
        unsaid, left, right = [
            await ask("/classify", input=LONG, **side)
            for side in ({}, {"truncation_side": "left"}, {"truncation_side": "right"})
        ]
        assert unsaid == left != right


async def test_what_has_no_effect_there_has_none_here(tmp_path: Path):
    path = write_family(tmp_path / "bert", "bert")
    arguments = {"model_args": {"add_pooling_layer": False, "revision": "main"}, "config_args": {"use_cache": True}}
    with_keys(path, "sentence_bert_config.json", backend="onnx", unpad_inputs=False, **arguments)
    with_keys(path, "config_sentence_transformers.json", telepathy=1, requirements={})
    with_keys(path, "1_Pooling/config.json", word_embedding_dimension=7)
    assert largest_difference(await ServedModel(path).embed(LONG), reference(path).encode(LONG)) < TOLERANCE
