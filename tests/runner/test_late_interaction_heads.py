"""Documents are scored against the vectors of queries that their params carry."""

from pathlib import Path

import numpy as np
import pytest

from tests.models.model_families import ServedModel
from tests.models.retrieval_families import DOCUMENTS, WIDTH, colbert_v2, some_tokens_only
from trio_pool_serve.types import Batch, MaxSim, TokenEmbed, Vectors


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    return ServedModel(colbert_v2(tmp_path_factory.mktemp("colbert") / "model"))


async def query_of(served: ServedModel) -> MaxSim:
    [(vectors,)] = await served.values(["who owns a task?"], TokenEmbed(), input_type="query")
    return MaxSim(vectors)


async def test_a_query_that_cannot_be_changed_is_scored(served: ServedModel):
    """As one from the cache of results."""
    query = await query_of(served)
    frozen = MaxSim(query.query.copy())
    frozen.query.setflags(write=False)
    assert frozen == query
    requests = await served.ask([DOCUMENTS[0]] * 2, [(query,), (frozen,)], "document")
    (score,), (again,) = await served.runner.launch(Batch(tuple(requests)))
    assert score == again


async def test_a_document_without_a_token_that_counts_has_no_vectors_and_the_least_score(tmp_path: Path):
    served = ServedModel(some_tokens_only(tmp_path / "model"))
    [(vectors,)] = await served.values([". ."], TokenEmbed(), input_type="document")
    assert vectors.shape == (0, WIDTH)
    query = await query_of(served)
    requests = await served.ask([". ."], [(query,)], "document")
    [((score,),)] = await served.runner.launch(Batch(tuple(requests)))
    assert score == pytest.approx(-1e9 / len(query.query))


async def test_token_vectors_are_cut_before_they_are_normalised(served: ServedModel):
    def unit(rows: Vectors) -> Vectors:
        return rows / np.linalg.norm(rows, axis=-1, keepdims=True)

    requests = await served.ask(
        [DOCUMENTS[0]] * 3,
        [(TokenEmbed(),), (TokenEmbed(dimensions=8),), (TokenEmbed(dimensions=8, normalize=False),)],
        "document",
    )
    (whole,), (cut,), (raw,) = await served.runner.launch(Batch(tuple(requests)))
    assert cut.shape == (len(whole), 8)
    assert np.abs(cut - unit(whole[:, :8])).max() < 1e-5
    assert np.abs(unit(raw) - cut).max() < 1e-5
    assert np.abs(np.linalg.norm(raw, axis=-1) - 1).max() > 0.1
