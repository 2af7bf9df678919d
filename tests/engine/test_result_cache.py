"""The cache of results: what it holds, in which order it lets go of it, and in how many bytes."""

import math
import tracemalloc
from collections import OrderedDict
from collections.abc import AsyncIterator, Sequence

import numpy as np
import pytest
import trio
from attrs import frozen
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from trio.testing import wait_all_tasks_blocked

from tests.engine.engines import engine_over, request, running
from tests.scripted_runner import ScriptedRunner
from trio_pool_serve.engine.admission import EstimatedWork
from trio_pool_serve.engine.engine import Engine
from trio_pool_serve.engine.queue_entry import Outputs, require_finite
from trio_pool_serve.engine.result_cache import (
    ARRAY_BYTES,
    ENTRY_BYTES,
    MAX_ROW_BYTES,
    Key,
    ModelResults,
    ResultCache,
    _encoded,
)
from trio_pool_serve.errors import NotFiniteError
from trio_pool_serve.telemetry.timings import RequestTimings
from trio_pool_serve.types import (
    Classify,
    CopiedBatch,
    Embed,
    ImageFeatures,
    MaxSim,
    PooledValue,
    PoolingOutput,
    PoolingParams,
    PoolingRequest,
    RenderedPrompt,
    SparseEmbed,
    SparseVector,
    TokenEmbed,
)

pytestmark = pytest.mark.unit

NUMBERS = 16
NBYTES = ENTRY_BYTES + ARRAY_BYTES + 4 * NUMBERS
"""Counted for an entry of one array of so many numbers."""


def vector(number: int, length: int = NUMBERS) -> tuple[PooledValue, ...]:
    return (np.full(length, number, dtype=np.float32),)


def key(number: int, model: int = 1) -> Key:
    return model, bytes([number])


def held(cache: ResultCache) -> list[Key]:
    return [*cache.entries]


def test_what_is_larger_than_a_row_may_be_is_not_kept():
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
    dense, weights = cache.find(key(1)) or ()
    assert dense.tolist() == [*range(NUMBERS, 2 * NUMBERS)]
    assert dense.base is None  # the batch's memory is free
    assert weights.values.tolist() == [1, 1, 1]
    for array in (dense, weights.indices, weights.values):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 7


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
            found = cache.find(one)
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


# -- rows that are computed because they are not cached -----------------------------------------------


@pytest.fixture
async def engine(scripted: ScriptedRunner) -> AsyncIterator[Engine]:
    async with running(engine_over(scripted)) as ready:
        yield ready


@pytest.fixture
def results() -> ModelResults:
    return ModelResults(ResultCache(2**20))


async def compute(
    results: ModelResults, engine: Engine, requests: Sequence[PoolingRequest], rows_done=None
) -> tuple[list[PoolingOutput], str]:
    """Return the outputs, and how many of the rows were cached."""
    timings, outputs = RequestTimings(), dict[int, PoolingOutput]()

    def note(computed: Outputs) -> None:
        outputs.update(computed)
        if rows_done is not None:
            rows_done(computed)

    await results.submit_all(engine, requests, note, timings)
    return [outputs[index] for index in range(len(requests))], f"{timings.cached}/{timings.looked_up}"


def rows_computed(runner: ScriptedRunner) -> list[list[int]]:
    return [each.prompt.token_ids.tolist() for batch in runner.batches for each in batch.requests]


async def test_only_rows_that_are_not_known_are_computed(results, engine, scripted):
    first, known = await compute(results, engine, [request(1), request(2), request(3)])
    assert known == "0/3"
    scripted.batches.clear()
    done: dict[int, PoolingOutput] = {}
    rows = [request(3), request(4), request(1), request(5), request(2)]
    outputs, known = await compute(results, engine, rows, done.update)
    assert known == "3/5"
    assert sorted(rows_computed(scripted)) == [[4], [5]]
    assert [output.values[0][2] for output in outputs] == [3, 4, 1, 5, 2]
    assert done == dict(enumerate(outputs))
    assert [*done][:3] == [0, 2, 4], "those that are known are not done at once"
    for index, before in ((0, 2), (2, 0), (4, 1)):
        assert outputs[index].values[0].tobytes() == first[before].values[0].tobytes()
        assert (outputs[index].queue_s, outputs[index].forward_s, outputs[index].copy_s) == (0, 0, 0)


BASE = RenderedPrompt(np.array([7, 8, 9], dtype=np.int32))

OTHERS = {
    "ids": replace(BASE, token_ids=np.array([7, 8, 8], dtype=np.int32)),
    "fewer ids": replace(BASE, token_ids=np.array([7, 8], dtype=np.int32)),
    "an instruction": replace(BASE, instruction_tokens=1),
    "segments": replace(BASE, type_ids=np.array([0, 1, 1], dtype=np.int32)),
    "attended": replace(BASE, attended=2),
    "kept": replace(BASE, kept=np.array([True, False, True])),
    "other kept": replace(BASE, kept=np.array([True, True, False])),
    "chunks": replace(BASE, chunks=np.array([[0, 1], [1, 3]], dtype=np.int32)),
    "other chunks": replace(BASE, chunks=np.array([[0, 2], [2, 3]], dtype=np.int32)),
}


async def test_each_difference_of_a_prompt_is_another_row(results, engine, scripted):
    for name, prompt in OTHERS.items():
        _, known = await compute(results, engine, [PoolingRequest(BASE), PoolingRequest(prompt)])
        assert known == ("0/2" if prompt is OTHERS["ids"] else "1/2"), name
        _, known = await compute(results, engine, [PoolingRequest(prompt)])
        assert known == "1/1", name


async def test_each_difference_of_params_is_another_row(results, engine):
    params = [
        (Embed(),),
        (Embed(dimensions=4),),
        (Embed(dimensions=5),),
        (Embed(normalize=False),),
        (Embed(normalize=True),),
        (TokenEmbed(),),
        (SparseEmbed(),),
        (Classify("raw"),),
        (Classify("score"),),
        (Embed(), Classify("raw")),
        (Classify("raw"), Embed()),
    ]
    for index, one in enumerate(params):
        outputs, known = await compute(results, engine, [PoolingRequest(BASE, one)])
        assert known == "0/1", index
        again, known = await compute(results, engine, [PoolingRequest(BASE, tuple(one))])
        assert known == "1/1"
        assert len(again[0].values) == len(outputs[0].values) == len(one)


async def test_who_asks_and_how_urgently_makes_no_difference(results, engine):
    await compute(results, engine, [PoolingRequest(BASE)])
    other = PoolingRequest(BASE, (Embed(),), priority=3, group=9, client=4, rank=1, deadline=math.inf)
    assert (await compute(results, engine, [other]))[1] == "1/1"


async def test_work_is_estimated_by_the_share_of_rows_that_were_not_known_of_late(results, engine):
    work = EstimatedWork(tokens=1000, rows=10)
    assert results.to_compute(work).tokens == 1000
    rows = [request(number) for number in range(1, 5)]
    await compute(results, engine, rows)
    assert results.to_compute(work).tokens == 1000
    for _ in range(60):
        await compute(results, engine, rows)
    assert results.to_compute(work).tokens < 5
    assert results.to_compute(work).rows == 10
    for number in range(100, 130):
        await compute(results, engine, [request(number)])
    assert results.to_compute(work).tokens > 900


async def test_another_model_and_one_that_is_loaded_again_have_no_results(engine):
    cache = ResultCache(2**20)
    first = ModelResults(cache)
    await compute(first, engine, [request(1)])
    assert (await compute(ModelResults(cache), engine, [request(1)]))[1] == "0/1"
    first.clear()
    assert (await compute(first, engine, [request(1)]))[1] == "0/1"
    assert cache.statistics().entries == 1


async def test_rows_that_are_computed_after_their_model_was_unloaded_are_not_cached(results, engine, scripted):
    scripted.gate.clear()
    done: list[int] = []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(compute, results, engine, [request(1)], lambda outputs: done.extend(dict(outputs)))
        await wait_all_tasks_blocked()
        results.clear()
        scripted.gate.set()
    assert done == [0]
    assert results.cache.statistics().entries == 0


@frozen
class Odd(PoolingParams):
    """Params whose fields cannot be encoded."""

    value: object


async def test_rows_that_are_not_looked_up_are_computed_each_time(results, engine, scripted):
    pixels = ImageFeatures({"pixel_values": np.zeros(3, np.float32)}, (3,))
    rows = [
        PoolingRequest(replace(BASE, images=pixels)),
        PoolingRequest(replace(BASE, embeds=np.zeros((3, 2), np.float32))),
    ]
    for _ in range(2):
        assert (await compute(results, engine, rows))[1] == "0/0"
    assert _encoded((MaxSim(np.zeros((3, 2), np.float32)),)) is None
    assert _encoded((Odd(object()),)) is None
    assert len(rows_computed(scripted)) == 4
    assert results.cache.statistics().entries == 0
    assert (results.cache.statistics().hits, results.cache.statistics().misses) == (0, 0)


async def test_rows_that_their_request_does_not_accept_are_not_cached(results, engine, scripted):
    scripted.on_launch = lambda batch: CopiedBatch([(np.array([np.nan], np.float32),) for _ in batch.requests])
    with pytest.raises(NotFiniteError):
        await compute(results, engine, [request(1)], require_finite)
    assert results.cache.statistics().entries == 0


async def test_cancellation_ends_a_request_whose_rows_are_all_known(results, engine):
    await compute(results, engine, [request(1)])
    with trio.move_on_after(0) as scope:
        await compute(results, engine, [request(1)])
    assert scope.cancelled_caught


async def test_equal_rows_at_the_same_time_are_computed_for_each_request(results, engine, scripted):
    """A request waits for none but its own rows: one that is cancelled takes nothing from another."""
    scripted.gate.clear()
    known: list[str] = []

    async def ask(scope: trio.CancelScope) -> None:
        with scope:
            known.append((await compute(results, engine, [request(1), request(2)]))[1])

    leader, follower = trio.CancelScope(), trio.CancelScope()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask, leader)
        await wait_all_tasks_blocked()
        nursery.start_soon(ask, follower)
        await wait_all_tasks_blocked()
        leader.cancel()
        scripted.gate.set()
    assert leader.cancelled_caught
    assert known == ["0/2"]
    assert (await compute(results, engine, [request(1), request(2)]))[1] == "2/2"
