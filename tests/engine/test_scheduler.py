from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from trio.testing import wait_all_tasks_blocked

from trio_pool_serve.engine.batching import BatchBudget, BatchLimits, ShortBatchBudget, length_class
from trio_pool_serve.engine.device import InFlightBatch
from trio_pool_serve.engine.queue_entry import QueueEntry
from trio_pool_serve.engine.scheduler import MAX_BATCHES_SINCE_SMALL, Scheduler
from trio_pool_serve.engine.waiting_rows import FAIRNESS
from trio_pool_serve.types import PlannedBatch, PoolingRequest, RenderedPrompt

pytestmark = pytest.mark.unit


def entry(tokens: int, priority: int = 0, group: int = 0, **fields) -> QueueEntry:
    prompt = RenderedPrompt(np.ones(tokens, dtype=np.int32))
    return QueueEntry(PoolingRequest(prompt, priority=priority, group=group, **fields))


def take(
    queue: Scheduler, max_tokens: int, short_tokens: int | None = None, *, leaves_long: bool = False, **limits: bool
) -> list[QueueEntry]:
    return queue.take(BatchLimits(max_tokens, short_tokens, **limits), leaves_long=leaves_long)


def queue_of(*entries: QueueEntry) -> Scheduler:
    queue = Scheduler()
    for each in entries:
        queue.put_nowait(each)
    return queue


def test_a_batch_stays_within_the_padded_budget():
    entries = [entry(3) for _ in range(6)]
    queue = queue_of(*entries)
    assert take(queue, 14) == entries[:4]
    assert take(queue, 14) == entries[4:]
    assert take(queue, 14) == []


def test_an_entry_longer_than_the_budget_rides_alone():
    long, short = entry(100), entry(1)
    queue = queue_of(long, short)
    assert take(queue, 10) == [short]
    assert take(queue, 10) == [long]


def test_the_smaller_priority_goes_first_and_age_decides_among_equals():
    late, first, second, urgent = entry(1, 5), entry(1), entry(1), entry(1, -1)
    assert take(queue_of(late, first, second, urgent), 100) == [urgent, first, second, late]


def test_a_withdrawn_entry_leaves_at_once_with_its_tokens():
    kept, gone = entry(2), entry(5)
    queue = queue_of(kept, gone)
    queue.withdraw(gone)
    queue.withdraw(gone)
    assert len(queue) == 1
    assert queue.tokens == 2
    assert repr(queue) == "<Scheduler 1 rows, 2 tokens>"


def test_a_batch_has_its_rows_in_the_queue_s_order():
    entries = [entry(4), entry(5)]
    batch = InFlightBatch(take(queue_of(*entries), 100)).batch
    assert [request.tokens for request in batch.requests] == [4, 5]
    assert (batch.tokens, batch.longest, batch.padded_tokens) == (9, 5, 10)


async def test_waiting_ends_with_the_first_entry_and_takes_nothing():
    queue = Scheduler()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(queue.changed.park)
        await wait_all_tasks_blocked()
        queue.put_nowait(entry(1))
    assert len(queue) == 1


async def test_waiting_can_be_cancelled_and_resumed():
    queue = Scheduler()
    with trio.CancelScope() as scope:
        scope.cancel()
        await queue.changed.park()
    assert scope.cancelled_caught
    async with trio.open_nursery() as nursery:
        nursery.start_soon(queue.changed.park)
        await wait_all_tasks_blocked()
        queue.changed.unpark_all()


# -- whose turn it is ---------------------------------------------------------------------------------


def test_a_short_row_goes_before_a_long_one_that_came_earlier():
    long, short = entry(512), entry(16)
    assert take(queue_of(long, short), 2048) == [short]


def test_a_single_row_goes_before_the_rest_of_a_large_request():
    large = [entry(34, group=1) for _ in range(100)]
    single = entry(34, group=2)
    assert take(queue_of(*large, single), 4 * 34) == [large[0], single, *large[1:3]]


def test_two_large_requests_take_turns():
    first = [entry(10, group=1) for _ in range(64)]
    second = [entry(10, group=2) for _ in range(64)]
    queue = queue_of(*first, *second)
    taken = [row.request.group for _ in range(8) for row in take(queue, 80)]
    assert 24 <= taken.count(2) <= 40


def test_a_request_s_rows_keep_their_order():
    rows = [entry(7, group=1) for _ in range(300)]
    queue = queue_of(*rows)
    assert [row for _ in range(10) for row in take(queue, 30 * 7)] == rows


def test_the_smaller_priority_opens_a_batch_even_if_it_is_due_later():
    urgent, ordinary = entry(512, -1), entry(16)
    queue = queue_of(entry(16))
    take(queue, 2048)
    queue.put_nowait(ordinary)
    queue.put_nowait(urgent)
    assert take(queue, 2048, 100) == [urgent]


def test_a_long_row_is_not_overtaken_for_ever_by_short_ones():
    long = entry(512)
    queue = queue_of(long)
    for _ in range(FAIRNESS * 512 // (16 * 16) + 1):
        for _ in range(16):
            queue.put_nowait(entry(16))
        take(queue, 16 * 16)
    assert long not in [*queue]
    assert queue.tokens > 0


def test_a_single_row_goes_before_its_client_s_large_request_however_many_others_wait():
    queue = queue_of(*[entry(10, group=1 + client, client=1 + client) for client in range(40) for _ in range(200)])
    for _ in range(400):
        take(queue, 100)
    single = entry(10, client=1)
    queue.put_nowait(single)
    taken = iter(lambda: take(queue, 1), [single])
    assert 1 not in {client for batch in taken for client in clients_of(batch)}


def test_turns_are_the_same_after_much_has_been_computed():
    queue = queue_of(entry(100_000))
    take(queue, 2048)
    large = [entry(34, group=1) for _ in range(100)]
    long, single = entry(512, group=2), entry(34, group=3)
    for row in (long, *large, single):
        queue.put_nowait(row)
    assert take(queue, 2 * 34) == [large[0], single]
    assert take(queue, 2 * 34) == large[1:3]


def test_the_rest_of_a_large_request_gets_its_eighth_while_others_never_stop_coming():
    large = [entry(32, group=1) for _ in range(80)]
    queue = queue_of(*large)
    for _ in range(2 * FAIRNESS * 80 // 8):  # twice, as waiting times are rounded up to powers of two
        for _ in range(8):
            queue.put_nowait(entry(32))
        take(queue, 8 * 32)
    assert not {*large} & {*queue}


# -- what rides together ------------------------------------------------------------------------------


def test_rows_of_other_lengths_ride_along_as_long_as_they_waste_little():
    queue = queue_of(*[entry(100) for _ in range(6)], entry(96), entry(95), entry(40))
    assert [row.request.tokens for row in take(queue, 900)] == [40]
    assert sorted(row.request.tokens for row in take(queue, 900)) == [95, 96, *[100] * 6]


def test_lengths_mix_only_as_far_as_little_is_wasted():
    rng = np.random.default_rng(0)
    queue = queue_of(*[entry(int(tokens)) for tokens in np.clip(rng.lognormal(3.3, 0.9, 2000), 4, 512)])
    padded = real = 0
    while queue:
        batch = InFlightBatch(take(queue, 2048)).batch
        padded += batch.padded_tokens
        real += batch.tokens
    assert real / padded > 0.9


def test_short_and_long_rows_never_ride_together():
    queue = queue_of(*[entry(512 if index % 20 == 0 else 16) for index in range(400)])
    while queue:
        batch = InFlightBatch(take(queue, 2048)).batch
        assert batch.tokens == batch.padded_tokens


def test_a_length_is_rounded_up_by_an_eighth_at_most():
    for tokens in range(9000):
        assert tokens <= length_class(tokens) <= tokens * 9 / 8
    assert len({length_class(tokens) for tokens in range(1, 8193)}) < 90


def test_where_padding_is_not_computed_the_budget_is_of_tokens():
    budget = BatchBudget(max_tokens=10, free_padding=0, pads=False)
    assert [budget.try_add(tokens) for tokens in (5, 1, 1, 1, 1, 2)] == [True, True, True, True, True, False]
    assert not budget.is_full
    assert budget.try_add(1)
    assert budget.is_full
    queue = Scheduler()
    entries = [entry(8), entry(1), entry(1)]
    for each in entries:
        queue.put_nowait(each)
    assert len(take(queue, 10, pads=False)) == 3


def test_a_budget_is_full_when_no_row_fits():
    budget = BatchBudget(max_tokens=10, free_padding=0)
    assert budget.try_add(5)
    assert not budget.is_full
    assert budget.try_add(5)
    assert budget.is_full
    assert not budget.try_add(1)


# -- long work ------------------------------------------------------------------------------------------


def test_while_small_requests_come_long_work_has_short_batches_of_its_own():
    queue = queue_of(entry(34, group=1))
    take(queue, 2048, 100)
    for _ in range(100):
        queue.put_nowait(entry(34, group=2))
    single = entry(34, group=3)
    queue.put_nowait(single)
    small = take(queue, 2048, 100)
    assert single in small
    assert len(small) == 1 + 256 // 34  # with the part of the large request that is none yet
    assert [len(take(queue, 2048, 100)) for _ in range(3)] == [2, 2, 2]


def test_long_work_has_full_batches_when_no_small_request_has_come_for_long():
    queue = queue_of(entry(34, group=1))
    take(queue, 2048, 100)
    for _ in range(2048):
        queue.put_nowait(entry(34, group=2))
    while queue.clock <= 34 + MAX_BATCHES_SINCE_SMALL * 2048:
        assert 1 < len(take(queue, 2048, 100)) < 8
    assert len(take(queue, 2048, 100)) == 2048 // 34


def test_a_large_request_alone_has_full_batches_from_the_start():
    queue = queue_of(*[entry(34, group=1) for _ in range(200)])
    assert len(take(queue, 2048, 100)) == 2048 // 34


def test_small_requests_that_devices_compute_for_other_processes_keep_batches_of_long_work_short():
    queue = queue_of(*[entry(34, group=2) for _ in range(2048)])
    assert len(take(queue, 2048, 100)) == 2048 // 34, "no small request has come"
    queue.small_elsewhere += 1
    assert [len(take(queue, 2048, 100)) for _ in range(3)] == [2, 2, 2]
    began = queue.clock
    while queue.clock <= began + MAX_BATCHES_SINCE_SMALL * 2048:
        take(queue, 2048, 100)
    assert len(take(queue, 2048, 100)) == 2048 // 34, "none has come for long"


def test_only_rows_with_the_key_of_the_first_are_computed_together():
    plain, images = ([entry(10, group=1), entry(10, group=2)] for _ in range(2))
    for each in images:
        each.key = "images"
    queue = queue_of(plain[0], images[0], plain[1], images[1])
    assert take(queue, 1000) == plain
    assert take(queue, 1000) == images


def settle(budget: ShortBatchBudget, tokens: int, seconds: Callable[[int], float]) -> set[int]:
    """Compute many rows of so many tokens; return how many of them the last batches had."""
    rows = []
    for _ in range(100):
        rows.append(max(1, budget.tokens // tokens))
        budget.observe(rows[-1] * tokens, seconds(rows[-1] * tokens))
    return set(rows[-20:])


def test_short_batches_grow_to_their_target_duration_whatever_a_batch_of_one_row_takes():
    budget = ShortBatchBudget()
    assert settle(budget, 34, lambda tokens: 0.008 + 1e-4 * tokens) <= {3, 4}, "0.0182 and 0.0216 s"
    assert settle(budget, 512, lambda tokens: 0.06) == {1}
    assert settle(budget, 34, lambda tokens: 0.004 + 1e-4 * tokens) <= {4, 5}, "0.0176 and 0.021 s"
    assert settle(ShortBatchBudget(), 34, lambda tokens: 0.018 + 1e-4 * tokens) == {1}


def test_short_batches_are_not_made_so_small_that_most_of_their_time_is_constant():
    """With a model whose row alone takes longer than a short batch may, and hardly longer than two rows."""
    budget = ShortBatchBudget()
    for _ in range(20):
        budget.observe(2048, 0.018 + 2.6e-4 * 2048)
    assert settle(budget, 34, lambda tokens: 0.018 + 2.6e-4 * tokens) <= {3, 4}, "0.045 and 0.053 s, alone 0.027"
    assert settle(budget, 400, lambda tokens: 0.018 + 2.6e-4 * tokens) == {1}
    assert settle(budget, 34, lambda tokens: 4e-4 * tokens) <= {1, 2}, "no part is constant"


def test_small_and_full_batches_do_not_change_the_budget_of_short_batches():
    budget = ShortBatchBudget()
    settle(budget, 34, lambda tokens: 1e-4 * tokens)
    before = budget.tokens
    for _ in range(100):
        budget.observe(16, 0.001)
        budget.observe(2048, 0.2)
    assert budget.tokens == before


# -- whatever happens ---------------------------------------------------------------------------------

PUT = st.tuples(st.just("put"), st.integers(0, 600), st.integers(0, 4), st.integers(0, 1))
WITHDRAW = st.tuples(st.just("withdraw"), st.integers(0, 50))
TAKE = st.tuples(st.just("take"), st.integers(1, 3000), st.none() | st.integers(0, 400))


@given(st.lists(PUT | WITHDRAW | TAKE, max_size=200))
def test_every_row_is_taken_once_within_the_budget_and_before_those_that_come_after_its_deadline(steps):
    queue = Scheduler()
    waiting: dict[QueueEntry, tuple[int, int]] = {}  # when it came, and when it its virtual deadline is at the latest
    of_group: Counter[int] = Counter()

    def take_some(max_tokens: int, short_batch_tokens: int | None) -> None:
        began = queue.clock
        taken = take(queue, max_tokens, short_batch_tokens)
        assert bool(taken) == bool(waiting)
        if not taken:
            return
        opening = taken[0]
        came, _ = waiting[opening]
        for row in taken:
            del waiting[row]  # raises if it was not waiting: nothing is taken twice
        assert len(taken) == 1 or InFlightBatch(taken).batch.padded_tokens <= max_tokens
        for row, (_, virtual_deadline) in waiting.items():
            assert row.request.priority >= opening.request.priority
            if row.request.priority == opening.request.priority and virtual_deadline <= began:
                assert came < virtual_deadline

    for step in [*steps, *[("take", 500, None)] * len(steps)]:
        match step:
            case "put", tokens, group, priority:
                row = entry(tokens, priority, group)
                of_group[group] += tokens
                weight = of_group[group] if group else tokens
                waiting[row] = (queue.clock, queue.clock + max(2, 2 * FAIRNESS * weight))
                queue.put_nowait(row)
            case "withdraw", index if index < len(waiting):
                row = list(waiting)[index]
                del waiting[row]
                queue.withdraw(row)
            case "take", max_tokens, short_batch_tokens:
                take_some(max_tokens, short_batch_tokens)
        assert len(queue) == len(waiting)
        assert set(queue) == set(waiting)
        assert queue.tokens == sum(row.request.tokens for row in waiting)
    assert not waiting
    assert (queue.tokens, queue._clients, queue._groups) == (0, {}, {})


# -- clients ------------------------------------------------------------------------------------------


def clients_of(entries: list[QueueEntry]) -> list[int]:
    return [row.request.client for row in entries]


def test_clients_take_turns_however_many_rows_each_has():
    flood = [entry(10, group=1 + number, client=1) for number in range(200)]
    queue = queue_of(*flood)
    take(queue, 100)
    for number in range(10):
        queue.put_nowait(entry(10, group=1000 + number, client=2))
    assert Counter(clients_of(take(queue, 100))) == {1: 5, 2: 5}
    assert Counter(clients_of(take(queue, 60))) == {1: 3, 2: 3}
    assert Counter(clients_of(take(queue, 100))) == {1: 8, 2: 2}
    assert clients_of(take(queue, 20)) == [1, 1]


def test_turns_are_counted_in_tokens():
    queue = queue_of(*[entry(100, client=1) for _ in range(50)], *[entry(10, client=2) for _ in range(500)])
    taken = Counter()
    for _ in range(40):
        for row in take(queue, 100):
            taken[row.request.client] += row.request.tokens
    assert 0.8 < taken[1] / taken[2] < 1.25


def test_a_client_that_begins_anew_has_no_credit_from_when_it_was_idle():
    queue = queue_of(entry(10, client=2))
    take(queue, 10)
    for _ in range(20):
        queue.put_nowait(entry(10, client=1))
        take(queue, 10)
    for _ in range(10):
        queue.put_nowait(entry(10, client=1))
        queue.put_nowait(entry(10, client=2))
    assert Counter(clients_of(take(queue, 100))) == {1: 5, 2: 5}


def test_a_priority_counts_among_the_rows_of_its_client_only():
    queue = queue_of(entry(10, 5, client=1), *[entry(10, -9, client=2) for _ in range(20)], entry(10, 0, client=1))
    taken = [(row.request.client, row.request.priority) for row in take(queue, 40)]
    assert taken[0] == (1, 0)
    assert Counter(taken) == {(1, 0): 1, (1, 5): 1, (2, -9): 2}


def test_a_rank_counts_among_all_rows():
    queue = queue_of(*[entry(10, client=1) for _ in range(9)], *[entry(10, client=2, rank=-1) for _ in range(5)])
    assert clients_of(take(queue, 60)) == [2] * 5 + [1]


def test_a_row_that_has_waited_for_too_long_comes_first_whatever_its_rank():
    queue = Scheduler(max_age_s=5)
    old = entry(10, 7, client=1, rank=7)
    old.queued_at -= 6
    urgent = [entry(10, -1, client=2, rank=-1) for _ in range(5)]
    for each in (old, *urgent):
        queue.put_nowait(each)
    assert take(queue, 20) == [old, urgent[0]]


def test_rows_that_have_waited_for_too_long_open_every_second_batch():
    queue = Scheduler(max_age_s=5)
    large = [entry(100, group=1) for _ in range(50)]
    for row in large:
        row.queued_at -= 6
    queue.put_nowait(*large)
    assert take(queue, 200) == large[:2]
    single = entry(4, group=2)
    queue.put_nowait(single)
    assert take(queue, 200) == [single]
    assert take(queue, 200) == large[2:4]


def test_a_long_row_that_has_waited_for_too_long_is_taken_by_the_first_thread_that_may():
    queue = Scheduler(max_age_s=5)
    old = entry(300, group=1, priority=5)
    old.queued_at -= 6
    queue.put_nowait(old)
    short = [entry(200, group=group) for group in range(2, 6)]
    for each in short:
        queue.put_nowait(each)
    assert take(queue, 200, leaves_long=True) == short[:1]
    assert take(queue, 300)[0] is old


def test_of_many_clients_those_whose_turn_it_is_are_served_first():
    queue = queue_of(*[entry(10, client=1 + number) for number in range(500)])
    queue.put_nowait(entry(10, client=1))
    taken = [client for _ in range(50) for client in clients_of(take(queue, 100))]
    assert sorted(taken) == list(range(1, 501))
    assert clients_of(take(queue, 100)) == [1]


# -- planned batches ------------------------------------------------------------------------------------


def take_any(queue: Scheduler, max_tokens: int, *, leaves_long: bool = False) -> list[QueueEntry]:
    """Take a batch as the dispatcher does: a planned one when no other row waits."""
    return take(queue, max_tokens, leaves_long=leaves_long) or ([] if len(queue) else queue.take_planned())


def test_a_planned_batch_is_taken_when_no_other_row_waits():
    queue = Scheduler()
    planned = [entry(3, planned=PlannedBatch(7, 2)) for _ in range(2)]
    other = entry(60)
    queue.put_nowait(*planned, other)
    assert take_any(queue, 64) == [other]
    assert take_any(queue, 64) == planned
    assert take_any(queue, 64) == []


def test_it_is_taken_whole_however_large_and_in_the_order_of_arrival():
    queue = Scheduler()
    first, second = ([entry(40, planned=PlannedBatch(number, 3)) for _ in range(3)] for number in (1, 2))
    queue.put_nowait(*first, *second)
    assert take_any(queue, 64) == first
    assert take_any(queue, 64) == second


def test_it_waits_for_its_last_row_without_holding_up_the_next():
    queue = Scheduler()
    late = entry(3, planned=PlannedBatch(1, 2))
    early, complete = entry(3, planned=PlannedBatch(1, 2)), entry(3, planned=PlannedBatch(2, 1))
    queue.put_nowait(early, complete)
    assert take_any(queue, 64) == [complete]
    assert queue.take_planned() == []
    queue.put_nowait(late)
    assert take_any(queue, 64) == [early, late]


def test_while_long_rows_are_left_to_other_threads_none_is_taken():
    queue = Scheduler()
    short = [entry(200) for _ in range(8)]
    queue.put_nowait(*short)  # long rows are kept together on account of short ones
    while take_any(queue, 2048):
        """Take the short ones."""
    long, planned = entry(1000), entry(3, planned=PlannedBatch(1, 1))
    queue.put_nowait(long, planned)
    assert take_any(queue, 2048, leaves_long=True) == []
    assert take_any(queue, 2048) == [long]
    assert take_any(queue, 2048, leaves_long=True) == [planned]


def test_withdrawn_rows_are_computed_with_their_batch_until_all_are_withdrawn():
    queue = Scheduler()
    batch = [entry(3, planned=PlannedBatch(1, 2)) for _ in range(2)]
    queue.put_nowait(*batch)
    batch[0].is_abandoned = True
    queue.withdraw(batch[0])
    assert len([*queue.planned]) == 2
    batch[1].is_abandoned = True
    queue.withdraw(batch[1])
    assert len([*queue.planned]) == 0
    assert take_any(queue, 64) == []


def test_planned_rows_do_not_count_as_waiting_but_are_among_those_that_fail_with_the_engine():
    queue = Scheduler()
    other, planned = entry(5), entry(3, planned=PlannedBatch(1, 1))
    queue.put_nowait(planned, other)
    assert (len(queue), queue.tokens) == (1, 5)
    assert list(queue) == [other, planned]
