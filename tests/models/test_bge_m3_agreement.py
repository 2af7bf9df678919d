"""BGE-M3's three kinds of vectors, from one forward pass, are those of its formulas."""

import itertools
import random
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from attrs import frozen

from tests.models.model_families import MAX_LENGTH, ServedModel, largest_difference
from tests.models.retrieval_families import DOCUMENTS, write_bge_m3
from trio_pool_serve.types import (
    Batch,
    Embed,
    PooledValue,
    PoolingParams,
    SparseEmbed,
    SparseVector,
    TokenEmbed,
    Vectors,
)

TOLERANCE = 1e-5
ALL = (Embed(), SparseEmbed(), TokenEmbed())


@frozen(eq=False)
class Expected:
    """What one text gives."""

    dense: Vectors
    weights: dict[int, float]
    tokens: Vectors


@frozen(eq=False)
class Model:
    """The folder, served, and what its formulas say of the documents."""

    served: ServedModel
    expected: list[Expected]


@torch.inference_mode()
def by_formula(path: Path, texts: tuple[str, ...]) -> list[Expected]:
    """One text at a time, word by word as section 3.1 of the paper has it."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    model = transformers.AutoModel.from_pretrained(path, add_pooling_layer=False, dtype=torch.float32).eval()
    layers = {}
    for name in ("sparse_linear", "colbert_linear"):
        state = torch.load(path / f"{name}.pt", weights_only=True)
        layers[name] = (state["weight"].float(), state["bias"].float())
    special = {getattr(tokenizer, f"{name}_token_id") for name in ("cls", "eos", "pad", "unk")}
    found = []
    for text in texts:
        inputs = tokenizer(text, truncation=True, max_length=MAX_LENGTH, return_tensors="pt")
        states = model(**inputs).last_hidden_state[0]
        weights: dict[int, float] = {}
        of_tokens = torch.relu(torch.nn.functional.linear(states, *layers["sparse_linear"]))[:, 0]
        for token, weight in zip(inputs["input_ids"][0].tolist(), of_tokens.tolist(), strict=True):
            if token not in special and weight > 0:
                weights[token] = max(weight, weights.get(token, 0.0))
        tokens = torch.nn.functional.linear(states[1:], *layers["colbert_linear"])
        unit = torch.nn.functional.normalize
        found.append(Expected(unit(states[0], dim=0).numpy(), weights, unit(tokens, dim=-1).numpy()))
    return found


@pytest.fixture(scope="module", params=["with modules", "without modules"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    path = write_bge_m3(tmp_path_factory.mktemp("bge") / "model", with_modules=request.param == "with modules")
    return Model(ServedModel(path), by_formula(path, DOCUMENTS))


def assert_agree(value: PooledValue, param: PoolingParams, expected: Expected) -> None:
    match param:
        case Embed():
            assert largest_difference([value], [expected.dense]) < TOLERANCE
        case TokenEmbed():
            assert value.shape == expected.tokens.shape
            assert largest_difference([value], [expected.tokens]) < TOLERANCE
        case SparseEmbed():
            assert isinstance(value, SparseVector)
            assert value.indices.tolist() == sorted(expected.weights)
            wanted = np.array([expected.weights[token] for token in value.indices.tolist()])
            assert np.abs(value.values - wanted).max(initial=0) < TOLERANCE


async def test_a_shuffled_batch_in_which_each_row_asks_for_other_things_agrees(model: Model):
    subsets = [subset for count in (1, 2, 3) for subset in itertools.permutations(ALL, count)]
    rows = list(itertools.product(range(len(DOCUMENTS)), subsets))
    random.Random(7).shuffle(rows)
    requests = await model.served.ask([DOCUMENTS[index] for index, _ in rows], [subset for _, subset in rows])
    answers = await model.served.runner.launch(Batch(tuple(requests)))
    for (index, subset), values in zip(rows, answers, strict=True):
        for value, param in zip(values, subset, strict=True):
            assert_agree(value, param, model.expected[index])
