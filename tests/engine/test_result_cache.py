"""The cache of results: what it holds, in which order it lets go of it, and in how many bytes."""

import tracemalloc
from collections import OrderedDict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trio_pool_serve.engine.result_cache import ARRAY_BYTES, ENTRY_BYTES, MAX_ROW_BYTES, Key, ResultCache
from trio_pool_serve.types import PooledValue, SparseVector

pytestmark = pytest.mark.unit

NUMBERS = 16
NBYTES = ENTRY_BYTES + ARRAY_BYTES + 4 * NUMBERS
"""Counted for an entry of one array of so many numbers."""


def vector(number: int, length: int = NUMBERS) -> tuple[PooledValue, ...]:
    return (np.full(length, number, dtype=np.float32),)


def key(number: int, model: int = 1) -> Key:
    return model, bytes([number])


def held(cache: ResultCache) -> list[Key]:
    return [*cache._entries]


def test_what_was_put_is_there_and_counted():
    cache = ResultCache(10 * NBYTES)
    assert cache.get(key(1)) is None
    cache.put(key(1), vector(5))
    (found,) = cache.get(key(1)) or ()
    assert np.array_equal(found, vector(5)[0])
    statistics = cache.statistics()
    assert (statistics.entries, statistics.bytes, statistics.hits, statistics.misses) == (1, NBYTES, 1, 1)


def test_what_was_used_longest_ago_goes_first():
    cache = ResultCache(3 * NBYTES)
    for number in (1, 2, 3):
        cache.put(key(number), vector(number))
    assert cache.get(key(1)) is not None
    cache.put(key(4), vector(4))
    assert held(cache) == [key(3), key(1), key(4)]
    cache.put(key(3), vector(9))  # again: used, and of other numbers
    cache.put(key(5), vector(5))
    assert held(cache) == [key(4), key(3), key(5)]
    assert cache.statistics().evictions == 2


def test_several_go_for_one_that_is_larger():
    cache = ResultCache(4 * NBYTES)
    for number in range(4):
        cache.put(key(number), vector(number))
    cache.put(key(9), vector(9, NUMBERS + NBYTES // 4))  # as many bytes as two
    assert held(cache) == [key(2), key(3), key(9)]
    assert cache.statistics().bytes == 4 * NBYTES


def test_what_is_larger_than_the_cache_or_than_a_row_may_be_is_not_kept():
    cache = ResultCache(NBYTES)
    cache.put(key(1), vector(1))
    cache.put(key(2), vector(2, NUMBERS + 1))
    assert held(cache) == [key(1)]
    large = ResultCache(10 * MAX_ROW_BYTES)
    large.put(key(1), vector(1, MAX_ROW_BYTES // 4))
    assert held(large) == []


def test_what_is_kept_is_a_copy_that_cannot_be_written_to():
    cache = ResultCache(10 * NBYTES)
    batch = np.arange(2 * NUMBERS, dtype=np.float32).reshape(2, NUMBERS)
    sparse = SparseVector(np.arange(3, dtype=np.int32), np.ones(3, dtype=np.float32))
    cache.put(key(1), (batch[1], sparse))
    batch[:] = -1
    sparse.values[:] = -1
    dense, weights = cache.get(key(1)) or ()
    assert dense.tolist() == [*range(NUMBERS, 2 * NUMBERS)]
    assert dense.base is None  # the batch's memory is free
    assert weights.values.tolist() == [1, 1, 1]
    for array in (dense, weights.indices, weights.values):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 7


def test_the_results_of_one_model_are_forgotten():
    cache = ResultCache(10 * NBYTES)
    for number in range(3):
        cache.put(key(number, model=1), vector(1))
        cache.put(key(number, model=2), vector(2))
    cache.forget(1)
    assert held(cache) == [key(number, model=2) for number in range(3)]
    assert cache.statistics().bytes == 3 * NBYTES
    assert cache.statistics().evictions == 0


OPERATIONS = st.lists(
    st.tuples(st.sampled_from(["put", "get", "forget"]), st.integers(0, 9), st.integers(0, 400)), max_size=60
)


@given(operations=OPERATIONS, max_bytes=st.integers(0, 6 * NBYTES))
def test_it_behaves_as_a_list_from_which_the_oldest_are_dropped(operations, max_bytes):
    cache, model = ResultCache(max_bytes), OrderedDict()

    def size_of(length: int) -> int:
        return ENTRY_BYTES + ARRAY_BYTES + 4 * length

    for operation, number, length in operations:
        if operation == "forget":
            cache.forget(number % 3)
            for one in [one for one in model if one[0] == number % 3]:
                del model[one]
            continue
        one = key(number, model=number % 3)
        if operation == "get":
            found = cache.get(one)
            assert (found is None) == (one not in model)
            if found is not None:
                model.move_to_end(one)
                assert len(found[0]) == model[one]
        elif size_of(length) <= max_bytes:
            cache.put(one, vector(number, length))
            model.pop(one, None)
            model[one] = length
            while sum(map(size_of, model.values())) > max_bytes:
                model.popitem(last=False)
        else:
            cache.put(one, vector(number, length))
        assert held(cache) == [*model]
        assert cache.statistics().bytes == sum(map(size_of, model.values())) <= max_bytes


@pytest.mark.parametrize("count", [100, 1400, 4000])
def test_python_takes_no_more_than_what_is_counted(count):
    dense, sparse = vector(1), (SparseVector(np.zeros(5, np.int32), np.zeros(5, np.float32)),)
    for values in (dense, sparse, (*dense, *sparse)):
        cache = ResultCache(2**40)
        tracemalloc.start()
        for number in range(count):
            cache.put((1, number.to_bytes(32, "big")), values)
        taken, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert 0.4 * cache.statistics().bytes < taken <= cache.statistics().bytes
