"""Planned batches wait for their rows, and for everything else."""

import numpy as np
import pytest

from trio_pool_serve.engine.batching import BatchLimits
from trio_pool_serve.engine.queue_entry import QueueEntry
from trio_pool_serve.engine.scheduler import Scheduler
from trio_pool_serve.types import PlannedBatch, PoolingRequest, RenderedPrompt

pytestmark = pytest.mark.unit


def entry(tokens: int, planned: PlannedBatch | None = None) -> QueueEntry:
    return QueueEntry(PoolingRequest(RenderedPrompt(np.ones(tokens, dtype=np.int32)), planned=planned))


def take(queue: Scheduler, max_tokens: int, *, leaves_long: bool = False) -> list[QueueEntry]:
    """Take a batch as the dispatcher does: a planned one when no other row waits."""
    return queue.take(BatchLimits(max_tokens), leaves_long=leaves_long) or ([] if len(queue) else queue.take_planned())


def test_a_planned_batch_is_taken_when_no_other_row_waits():
    queue = Scheduler()
    planned = [entry(3, PlannedBatch(7, 2)) for _ in range(2)]
    other = entry(60)
    queue.put_nowait(*planned, other)
    assert take(queue, 64) == [other]
    assert take(queue, 64) == planned
    assert take(queue, 64) == []


def test_it_is_taken_whole_however_large_and_in_the_order_of_arrival():
    queue = Scheduler()
    first, second = ([entry(40, PlannedBatch(number, 3)) for _ in range(3)] for number in (1, 2))
    queue.put_nowait(*first, *second)
    assert take(queue, 64) == first
    assert take(queue, 64) == second


def test_it_waits_for_its_last_row_without_holding_up_the_next():
    queue = Scheduler()
    late = entry(3, PlannedBatch(1, 2))
    early, complete = entry(3, PlannedBatch(1, 2)), entry(3, PlannedBatch(2, 1))
    queue.put_nowait(early, complete)
    assert take(queue, 64) == [complete]
    assert queue.take_planned() == []
    queue.put_nowait(late)
    assert take(queue, 64) == [early, late]


def test_while_long_rows_are_left_to_other_threads_none_is_taken():
    queue = Scheduler()
    short = [entry(200) for _ in range(8)]
    queue.put_nowait(*short)  # long rows are kept together on account of short ones
    while take(queue, 2048):
        """Take the short ones."""
    long, planned = entry(1000), entry(3, PlannedBatch(1, 1))
    queue.put_nowait(long, planned)
    assert take(queue, 2048, leaves_long=True) == []
    assert take(queue, 2048) == [long]
    assert take(queue, 2048, leaves_long=True) == [planned]


def test_withdrawn_rows_are_computed_with_their_batch_until_all_are_withdrawn():
    queue = Scheduler()
    batch = [entry(3, PlannedBatch(1, 2)) for _ in range(2)]
    queue.put_nowait(*batch)
    batch[0].is_abandoned = True
    queue.withdraw(batch[0])
    assert len([*queue.planned]) == 2
    batch[1].is_abandoned = True
    queue.withdraw(batch[1])
    assert len([*queue.planned]) == 0
    assert take(queue, 64) == []


def test_planned_rows_do_not_count_as_waiting_but_are_among_those_that_fail_with_the_engine():
    queue = Scheduler()
    other, planned = entry(5), entry(3, PlannedBatch(1, 1))
    queue.put_nowait(planned, other)
    assert (len(queue), queue.tokens) == (1, 5)
    assert list(queue) == [other, planned]
