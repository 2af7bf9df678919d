import numpy as np
import pytest

from trio_pool_serve.engine.device import MAX_DELIVERED_ROWS, InFlightBatch, deliver
from trio_pool_serve.engine.queue_entry import QueueEntry, Settled
from trio_pool_serve.types import PoolingOutput, PoolingRequest, RenderedPrompt

pytestmark = pytest.mark.unit


def entry(settled: Settled, number: int = 0) -> QueueEntry:
    return QueueEntry(PoolingRequest(RenderedPrompt(np.ones(1, dtype=np.int32))), settled, number=number)


class Submitter:
    def __init__(self) -> None:
        self.deliveries: list[list[int]] = []

    def settled(self, entries: list[QueueEntry]) -> None:
        assert all(entry.is_settled for entry in entries)
        self.deliveries.append([entry.number for entry in entries])


async def test_rows_of_one_submitter_are_delivered_together_wherever_they_are_in_the_batch():
    first, second = Submitter(), Submitter()
    entries = [entry((first, second)[number % 2].settled, number) for number in range(10)]
    in_flight = InFlightBatch(entries)
    in_flight.forward_s, in_flight.copy_s = 0.25, 0.5
    await in_flight.deliver([(np.full(1, number),) for number in range(10)])
    assert first.deliveries == [[0, 2, 4, 6, 8]]
    assert second.deliveries == [[1, 3, 5, 7, 9]]
    for number, each in enumerate(entries):
        assert each.output is not None
        assert each.output.values[0] == number
        assert (each.output.forward_s, each.output.copy_s) == (0.25, 0.5)
        assert each.output.queue_s == in_flight.launched - each.queued_at


async def test_a_submitter_is_not_given_more_rows_at_once_than_the_limit():
    one, other = Submitter(), Submitter()
    rows = [entry(one.settled, number) for number in range(2 * MAX_DELIVERED_ROWS + 1)]
    output = PoolingOutput((), 0.0, 0.0, 0.0)
    await deliver([(row, output) for row in [*rows, entry(other.settled)]])
    assert [len(each) for each in one.deliveries] == [MAX_DELIVERED_ROWS, MAX_DELIVERED_ROWS, 1]
    assert [number for each in one.deliveries for number in each] == [row.number for row in rows]
    assert other.deliveries == [[0]]
