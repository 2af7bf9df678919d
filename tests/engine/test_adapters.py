"""Rows with adapters: which are computed together, in whose turn, and what an adapter that cannot be applied costs."""

import numpy as np
import pytest
from trio.testing import wait_all_tasks_blocked

from tests.engine.engines import Outcomes, compute_window, computing, engine_over, first_ids, request, running
from tests.scripted_runner import ScriptedRunner
from trio_pool_serve.engine.batching import BatchLimits, batch_key
from trio_pool_serve.engine.lost_rows import LostRows
from trio_pool_serve.engine.queue_entry import QueueEntry
from trio_pool_serve.engine.remote.joiner import Joiner, SentBatch
from trio_pool_serve.engine.remote.wire import BatchFacts
from trio_pool_serve.engine.result_cache import ModelResults, ResultCache
from trio_pool_serve.engine.scheduler import Scheduler
from trio_pool_serve.errors import AdapterError, BatchFailedError
from trio_pool_serve.telemetry.timings import RequestTimings
from trio_pool_serve.types import Adapter, Batch, PoolingRequest, RenderedPrompt

pytestmark = pytest.mark.unit

ADAPTERS = [None, *(Adapter(f"/adapters/{name}", name) for name in "abc")]
_, A, B, C = ADAPTERS


def entry(adapter: Adapter | None, **fields) -> QueueEntry:
    row = PoolingRequest(RenderedPrompt(np.ones(10, np.int32)), adapter=adapter, **fields)
    return QueueEntry(row, key=batch_key(row))


def adapters_of(runner: ScriptedRunner) -> list[set[Adapter | None]]:
    return [{row.adapter for row in batch.requests} for batch in runner.batches]


async def test_a_batch_has_rows_of_one_adapter(scripted):
    async with running(engine_over(scripted)) as engine, computing(engine, scripted) as nursery:
        outcomes = Outcomes()
        for number in range(40):
            nursery.start_soon(outcomes.submit, engine, number, request(number + 2, adapter=ADAPTERS[number % 4]))
        await wait_all_tasks_blocked()
    assert len(outcomes.answered) == 40
    assert {len(adapters) for adapters in adapters_of(scripted)} == {1}
    assert len(scripted.batches) <= 7, "rows of one adapter are computed together"


@pytest.mark.parametrize("clients", [1, 100])
def test_a_row_does_not_wait_behind_the_flood_of_another_adapter(clients):
    """The flood is 250 batches, of the same client in large requests, or of a hundred other clients."""
    queue = Scheduler()
    queue.put_nowait(*[entry(A, group=1 + row // 100, client=row % clients) for row in range(5000)])
    queue.take(BatchLimits(200))
    queue.put_nowait(lone := entry(B, group=9999, client=0 if clients == 1 else 100))
    batches = 0
    while lone not in (taken := queue.take(BatchLimits(200))):
        assert {each.request.adapter for each in taken} == {A}
        batches += 1
        queue.put_nowait(*[entry(A, group=10_000 + batches, client=row % clients) for row in range(20)])
    assert taken == [lone]
    assert batches <= 10


def test_adapters_take_turns_at_a_device_that_api_processes_share():
    joiner = Joiner()

    def send(number: int, adapter: Adapter, rows: int) -> None:
        batch = SentBatch(BatchFacts(number, rows, batch_key(entry(adapter).request)), lambda *_: None)
        batch.rows.update(
            {QueueEntry(entry(adapter).request, batch.settle, holder=batch, tokens=10): None for _ in range(rows)}
        )
        joiner.put_nowait(batch)

    for number, (adapter, rows) in enumerate([(A, 100), (A, 100), (B, 1), (C, 40)]):
        send(number, adapter, rows)
    passes = [joiner.take(BatchLimits(200)) for _ in range(5)]
    assert [{each.request.adapter for each in rows} for rows in passes] == [{A}, {B}, {C}, {A}, {C}]


async def test_windows_of_background_work_have_batches_of_one_adapter(scripted):
    members = [[request(2, adapter=A), request(3)], [request(4, 4, adapter=B), request(5, adapter=A)]]
    async with running(engine_over(scripted)) as engine:
        scripted.batches.clear()
        assert await compute_window(engine, *members) == [[1, 1], [2, 1]]
    assert [first_ids(batch) for batch in scripted.batches] == [[3], [2, 5], [4]]


async def test_an_adapter_that_cannot_be_applied_fails_its_rows_at_once_and_no_others(scripted):
    def refuse(batch: Batch) -> None:
        if batch.adapter == A:
            raise AdapterError("the files have changed")

    scripted.on_launch = refuse
    async with running(engine_over(scripted)) as engine:
        outcomes = Outcomes()
        async with computing(engine, scripted) as nursery:
            for number in range(40):
                nursery.start_soon(outcomes.submit, engine, number, request(number + 2, adapter=[A, B][number % 2]))
            await wait_all_tasks_blocked()
        assert await engine.submit(request(5, adapter=B))
        assert (engine.state, engine.devices.device.failed_batches, engine.devices.device.budget.tokens) == (
            "ready",
            0,
            64,
        )
    assert sorted(outcomes.failed) == [number for number in range(40) if number % 2 == 0]
    assert {(type(error), str(error)) for error in outcomes.failed.values()} == {
        (AdapterError, "the files have changed")
    }
    assert len(outcomes.answered) == 20
    assert adapters_of(scripted).count({A}) == 1


async def test_a_backend_without_adapters_computes_no_row_that_has_one(scripted):
    scripted.takes_adapters = False
    async with running(engine_over(scripted)) as engine:
        with pytest.raises(AdapterError, match="--backend torch"):
            await engine.submit(request(5, adapter=A))
        assert await engine.submit(request(5))


async def test_cached_results_belong_to_an_adapter(scripted):
    results, timings = ModelResults(ResultCache(2**20)), RequestTimings()
    async with running(engine_over(scripted)) as engine:
        for adapter in (*ADAPTERS, *ADAPTERS):
            await results.submit_all(engine, [request(7, adapter=adapter)], lambda _: None, timings)
    assert (timings.looked_up, timings.cached) == (8, 4)


async def test_a_row_that_ended_engines_is_refused_with_its_adapter_only():
    lost = LostRows()
    lost.refuse(entry(A))
    assert [each.request.adapter for each in lost.fail_refused([*map(entry, ADAPTERS)])] == [None, B, C]


def test_the_error_of_an_adapter_is_one_of_a_batch():
    assert issubclass(AdapterError, BatchFailedError)
