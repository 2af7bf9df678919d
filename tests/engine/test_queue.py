import numpy as np
import trio
from trio.testing import wait_all_tasks_blocked

from trio_pool_serve.engine.queue import QueueEntry, RequestQueue, batch_of
from trio_pool_serve.types import PoolingRequest, RenderedPrompt


def entry(tokens: int, priority: int = 0) -> QueueEntry:
    return QueueEntry(PoolingRequest(RenderedPrompt(np.ones(tokens, dtype=np.int32)), priority=priority))


def queue_of(*entries: QueueEntry) -> RequestQueue:
    queue = RequestQueue()
    for each in entries:
        queue.put_nowait(each)
    return queue


def test_a_batch_stays_within_the_padded_budget():
    entries = [entry(3), entry(3), entry(6), entry(1)]
    queue = queue_of(*entries)
    assert queue.take_batch(12) == entries[:2]  # with the third they would be 3 rows of 6
    assert queue.take_batch(12) == entries[2:]


def test_an_entry_longer_than_the_budget_rides_alone():
    entries = [entry(100), entry(1)]
    queue = queue_of(*entries)
    assert queue.take_batch(10) == entries[:1]


def test_the_smaller_priority_goes_first_and_age_decides_among_equals():
    late, first, second, urgent = entry(1, 5), entry(1), entry(1), entry(1, -1)
    assert queue_of(late, first, second, urgent).take_batch(100) == [urgent, first, second, late]


def test_a_withdrawn_entry_leaves_at_once_with_its_tokens():
    kept, gone = entry(2), entry(5)
    queue = queue_of(kept, gone)
    queue.withdraw(gone)
    queue.withdraw(gone)
    assert len(queue) == 1
    assert queue.tokens == 2
    assert repr(queue) == "<RequestQueue 1 rows, 2 tokens>"


def test_a_batch_has_its_rows_in_the_queue_s_order():
    entries = [entry(2), entry(5)]
    batch = batch_of(queue_of(*entries).take_batch(100))
    assert [request.tokens for request in batch.requests] == [2, 5]
    assert (batch.tokens, batch.longest, batch.padded_tokens) == (7, 5, 10)


async def test_waiting_ends_with_the_first_entry_and_takes_nothing():
    queue = RequestQueue()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(queue.wait_not_empty)
        await wait_all_tasks_blocked()
        queue.put_nowait(entry(1))
    assert len(queue) == 1


async def test_waiting_can_be_cancelled_and_resumed():
    queue = RequestQueue()
    with trio.CancelScope() as scope:
        scope.cancel()
        await queue.wait_not_empty()
    assert scope.cancelled_caught
    queue.put_nowait(entry(1))
    await queue.wait_not_empty()
