"""Each family's vectors are those of sentence-transformers, whatever batch they ride in."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from attrs import frozen

from tests.models.model_families import (
    FAMILIES,
    TEXTS,
    ServedModel,
    edit_json,
    largest_difference,
    reference,
    shuffled,
    write_family,
)
from trio_pool_serve.types import Batch, Vectors

TOLERANCE = 1e-5


@frozen(eq=False)
class Pair:
    """One folder, loaded here and there."""

    ours: ServedModel
    theirs: Any
    expected: Vectors


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    path = write_family(tmp_path_factory.mktemp("family") / request.param, request.param)
    theirs = reference(path)
    return Pair(ServedModel(path), theirs, theirs.encode(list(TEXTS)))


async def test_a_text_alone_agrees(pair: Pair):
    requests = await pair.ours.requests(TEXTS)
    rows = [(await pair.ours.runner.launch(Batch((request,))))[0][0] for request in requests]
    assert largest_difference(rows, pair.expected) < TOLERANCE


async def test_a_shuffled_batch_with_repeats_agrees(pair: Pair):
    order = shuffled(TEXTS)
    rows = await pair.ours.embed([TEXTS[index] for index in order])
    assert largest_difference(rows, pair.expected[order]) < TOLERANCE


async def test_an_instruction_agrees_with_a_prompt(pair: Pair):
    rows = await pair.ours.embed(TEXTS, instruction=pair.ours.folder.prompts["query"])
    assert largest_difference(rows, pair.theirs.encode(list(TEXTS), prompt_name="query")) < TOLERANCE


def test_the_texts_are_told_apart(pair: Pair):
    """Else agreement would prove nothing."""
    unit = pair.expected / np.linalg.norm(pair.expected, axis=1, keepdims=True)
    assert (unit @ unit.T - np.eye(len(TEXTS))).max() < 0.99


def test_the_runner_knows_its_dimensions(pair: Pair):
    assert pair.ours.runner.dimensions == pair.expected.shape[1]


def test_the_description_names_family_type_and_size(pair: Pair):
    description = pair.ours.runner.describe()
    for said in (pair.ours.folder.model_type, "float32 on cpu", f"{pair.ours.runner.dimensions} dimensions"):
        assert said in description


async def require_agreement(path: Path) -> None:
    assert largest_difference(await ServedModel(path).embed(TEXTS), reference(path).encode(list(TEXTS))) < TOLERANCE


async def test_the_packaged_minilm_agrees(minilm: Path):
    await require_agreement(minilm)


async def test_a_folder_without_modules_is_pooled_by_mean(tmp_path: Path):
    path = write_family(tmp_path / "bare", "bert", modules=())
    (path / "modules.json").unlink()
    await require_agreement(path)


@pytest.mark.parametrize("lower_case", [False, True])
async def test_lower_casing_agrees(tmp_path: Path, *, lower_case: bool):
    path = write_family(tmp_path / "cased", "roberta", do_lower_case=lower_case)
    texts = ["A Nursery OWNS Its Tasks.", "a nursery owns its tasks."]
    rows = await ServedModel(path).embed(texts)
    assert largest_difference(rows, reference(path).encode(texts)) < TOLERANCE
    assert np.array_equal(rows[0], rows[1]) == lower_case


async def test_a_transformer_in_a_folder_of_its_own_agrees(tmp_path: Path):
    path = write_family(tmp_path / "nested", "bert")
    inner = path / "0_Transformer"
    inner.mkdir()
    names = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "sentence_bert_config.json")
    for name in names:
        (path / name).rename(inner / name)
    edit_json(path / "modules.json", lambda entries: entries[0].update(path=inner.name))
    await require_agreement(path)
