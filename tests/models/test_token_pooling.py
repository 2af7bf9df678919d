"""The vectors of tokens are clustered as sentence-transformers does it with scipy."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch

from trio_pool_serve.errors import InvalidRequestError
from trio_pool_serve.models.token_pooling import TokenPooling, pool_rows
from trio_pool_serve.runner.ward_clusters import ward_clusters
from trio_pool_serve.tasks.pool import pooled_tokens
from trio_pool_serve.types import Vectors


def of_sentence_transformers(vectors: Vectors, pooling: TokenPooling) -> Vectors:
    from sentence_transformers.multi_vector_encoder.modules import HierarchicalTokenPooling

    theirs = HierarchicalTokenPooling(
        pooling.factor, num_protected_tokens=pooling.protected_tokens, normalize_embeddings=pooling.normalizes
    )
    return np.asarray(theirs.pool_one(torch.from_numpy(vectors)).numpy())


def unit(vectors: Vectors) -> Vectors:
    return np.asarray(vectors / np.linalg.norm(vectors, axis=1, keepdims=True), dtype=np.float32)


@pytest.mark.parametrize("factor", [1, 1.5, 2, 3, 7.5, 1e9])
def test_random_vectors_are_pooled_to_the_same_rows(factor: float):
    random = np.random.default_rng(1)
    for tokens in (0, 1, 2, 3, 4, 5, 8, 21, 60, 181):
        for protected in (0, 1, 3):
            pooling = TokenPooling(factor=factor, protected_tokens=protected, normalizes=bool(protected))
            vectors = unit(random.normal(size=(tokens, 16)))
            ours, expected = pool_rows(vectors, pooling), of_sentence_transformers(vectors, pooling)
            assert ours.dtype == np.float32
            assert ours.shape == expected.shape
            assert np.abs(ours - expected).max(initial=0) < 1e-6


def test_vectors_that_are_not_of_unit_length_are_compared_by_their_products():
    vectors = np.random.default_rng(2).normal(size=(30, 4)).astype(np.float32) / 3
    pooling = TokenPooling(factor=4, normalizes=False)
    assert np.abs(pool_rows(vectors, pooling) - of_sentence_transformers(vectors, pooling)).max() < 1e-6


def test_equal_distances_give_fewer_clusters_and_lose_no_vector():
    equal = np.zeros((9, 4), np.float32)
    equal[:, 0] = 1
    assert [sorted(members) for members in ward_clusters(equal, 4)] == [list(range(9))]
    pooling = TokenPooling(factor=2, protected_tokens=0)
    assert np.array_equal(pool_rows(equal, pooling), of_sentence_transformers(equal, pooling))
    of_axes = np.repeat(np.eye(4, dtype=np.float32), 3, axis=0)  # every distance is 0 or 1
    clusters = ward_clusters(of_axes, 4)
    assert sorted(sorted(of_cluster) for of_cluster in clusters) == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]]
    assert sorted(itertools.chain(*ward_clusters(of_axes, 2))) == list(range(12))


async def test_more_vectors_than_can_be_clustered_in_about_a_tenth_of_a_second_are_refused():
    no_model: Any = None
    with pytest.raises(InvalidRequestError, match="has 2049 token vectors; token_pooling can pool up to 2048"):
        await pooled_tokens(no_model, np.ones((2049, 2), np.float32), TokenPooling(factor=2))
