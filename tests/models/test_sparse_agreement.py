"""Sparse vectors are those of sentence-transformers, by a forward pass and by look-up."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from attrs import frozen

from tests.models.model_families import ServedModel
from tests.models.retrieval_families import DOCUMENTS, MASKED_LMS, QUERIES, SPARSE, assert_same_ranking, write_masked_lm
from trio_pool_serve.prompts import InputType
from trio_pool_serve.types import Batch, PoolingRequest, SparseEmbed, SparseVector, Vectors

TOLERANCE = 1e-5
SCORE_TOLERANCE = 1e-4


@frozen(eq=False)
class Pair:
    """One folder, loaded here and there, with what the oracle makes of the texts."""

    ours: ServedModel
    theirs: Any
    expected: dict[InputType | None, Vectors]


def relative_difference(ours: Vectors, theirs: Vectors) -> float:
    """The largest difference, in parts of the number where that is above 1: sums over tokens and words grow."""
    return float((np.abs(ours - theirs) / np.maximum(np.abs(theirs), 1)).max())


def expectations(theirs: Any) -> dict[InputType | None, Vectors]:
    dense = {"convert_to_sparse_tensor": False}
    return {
        "query": theirs.encode_query(list(QUERIES), **dense).numpy(),
        "document": theirs.encode_document(list(DOCUMENTS), **dense).numpy(),
        None: theirs.encode(list(DOCUMENTS), **dense).numpy(),
    }


TEXTS_OF: dict[InputType | None, tuple[str, ...]] = {"query": QUERIES, "document": DOCUMENTS, None: DOCUMENTS}


@pytest.fixture(scope="module", params=SPARSE)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    from sentence_transformers import SparseEncoder

    path = SPARSE[request.param](tmp_path_factory.mktemp("sparse") / request.param)
    theirs = SparseEncoder(str(path), device="cpu", local_files_only=True)
    return Pair(ServedModel(path), theirs, expectations(theirs))


async def requests(served: ServedModel, input_type: InputType | None) -> list[PoolingRequest]:
    texts = TEXTS_OF[input_type]
    return await served.ask(texts, [(served.folder.spec.sparse_params(input_type),)] * len(texts), input_type)


def spread(row: SparseVector, width: int) -> Vectors:
    weights = np.zeros(width, dtype=np.float32)
    weights[row.indices] = row.values
    return weights


async def computed(served: ServedModel, batch: list[PoolingRequest]) -> list[SparseVector]:
    return [row for (row,) in await served.runner.launch(Batch(tuple(batch)))]


def assert_agree(ours: list[SparseVector], theirs: Vectors) -> None:
    for row, wanted in zip(ours, theirs, strict=True):
        assert relative_difference(spread(row, len(wanted)), wanted) < TOLERANCE
        assert (row.values != 0).all()
        assert (np.diff(row.indices) > 0).all()


@pytest.mark.parametrize("input_type", TEXTS_OF)
async def test_texts_of_mixed_lengths_in_one_batch_agree(pair: Pair, input_type: InputType | None):
    assert_agree(await computed(pair.ours, await requests(pair.ours, input_type)), pair.expected[input_type])


@pytest.mark.parametrize("input_type", TEXTS_OF)
async def test_a_text_alone_agrees(pair: Pair, input_type: InputType | None):
    rows = [(await computed(pair.ours, [request]))[0] for request in await requests(pair.ours, input_type)]
    assert_agree(rows, pair.expected[input_type])


async def test_queries_and_documents_in_one_shuffled_batch_agree(pair: Pair):
    batch = [*await requests(pair.ours, "query"), *await requests(pair.ours, "document")] * 2
    expected = np.concatenate([pair.expected["query"], pair.expected["document"]] * 2)
    order = random.Random(7).sample(range(len(batch)), len(batch))
    assert_agree(await computed(pair.ours, [batch[index] for index in order]), expected[order])


async def test_scores_and_their_ranking_agree(pair: Pair):
    wanted = pair.theirs.similarity(pair.expected["query"], pair.expected["document"]).numpy()
    width = pair.expected["query"].shape[1]
    queries = await computed(pair.ours, await requests(pair.ours, "query"))
    documents = await computed(pair.ours, await requests(pair.ours, "document"))
    scores = np.array([[spread(query, width) @ spread(row, width) for row in documents] for query in queries])
    assert relative_difference(scores, wanted) < SCORE_TOLERANCE
    assert_same_ranking(scores, wanted)


@pytest.mark.parametrize("name", MASKED_LMS)
async def test_a_bare_masked_language_model_agrees_if_the_operator_says_so(
    tmp_path: Path, name: str, record_agreement: Callable[..., None]
):
    from sentence_transformers import SparseEncoder

    path = write_masked_lm(tmp_path / name, name)
    served = ServedModel(path, settings={"task": "sparse_embed"})
    theirs = SparseEncoder(str(path), device="cpu", local_files_only=True)
    rows, wanted = await computed(served, await requests(served, "document")), expectations(theirs)["document"]
    assert_agree(rows, wanted)
    difference = relative_difference(np.stack([spread(row, wanted.shape[1]) for row in rows]), wanted)
    record_agreement(f"{name} masked language model", "sparse_embed", "SparseEncoder", difference)


async def test_a_bare_masked_language_model_is_an_embedding_model_otherwise(tmp_path: Path):
    served = ServedModel(write_masked_lm(tmp_path / "bert", "bert"))
    assert served.folder.spec.tasks == {"embed", "token_embed", "score"}
    assert SparseEmbed not in served.runner.heads
