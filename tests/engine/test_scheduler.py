import math
from collections import Counter
from contextlib import ExitStack

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    multiple,
    rule,
    run_state_machine_as_test,
)

from trio_pool_serve.engine.admission import COMES_AGAIN, Admission, EstimatedWork
from trio_pool_serve.engine.batching import (
    FREE_PADDING_DIVISOR,
    MAX_PADDING_SHARE,
    BatchBudget,
    BatchLimits,
    length_class,
)
from trio_pool_serve.engine.device import InFlightBatch
from trio_pool_serve.engine.queue_classes import FAIRNESS, SHORT_TOKENS
from trio_pool_serve.engine.queue_entry import QueueEntry
from trio_pool_serve.engine.scheduler import MAX_BATCHES_SINCE_SMALL, Scheduler
from trio_pool_serve.engine.speed import WORK_CLASSES, ComputeRates
from trio_pool_serve.types import Client, PoolingRequest, RenderedPrompt

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


# -- whose turn it is ---------------------------------------------------------------------------------


def test_a_single_row_goes_before_the_rest_of_a_large_request():
    large = [entry(34, group=1) for _ in range(100)]
    single = entry(34, group=2)
    assert take(queue_of(*large, single), 4 * 34) == [large[0], single, *large[1:3]]


def test_a_request_s_rows_keep_their_order():
    rows = [entry(7, group=1) for _ in range(300)]
    queue = queue_of(*rows)
    assert [row for _ in range(10) for row in take(queue, 30 * 7)] == rows


def test_a_single_row_goes_before_its_client_s_large_request_however_many_others_wait():
    queue = queue_of(*[entry(10, group=1 + client, client=1 + client) for client in range(40) for _ in range(200)])
    for _ in range(400):
        take(queue, 100)
    single = entry(10, client=1)
    queue.put_nowait(single)
    taken = iter(lambda: take(queue, 1), [single])
    assert 1 not in {client for batch in taken for client in clients_of(batch)}


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
    assert len(take(queue_of(entry(8), entry(1), entry(1)), 10, pads=False)) == 3
    padding = BatchBudget(max_tokens=10, free_padding=0)
    assert [(padding.try_add(5), padding.is_full) for _ in range(3)] == [(True, False), (True, True), (False, True)]


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


def test_small_requests_that_devices_compute_for_other_processes_keep_batches_of_long_work_short():
    queue = queue_of(*[entry(34, group=2) for _ in range(2048)])
    assert len(take(queue, 2048, 100)) == 2048 // 34, "no small request has come"
    queue.small_elsewhere += 1
    assert [len(take(queue, 2048, 100)) for _ in range(3)] == [2, 2, 2]
    began = queue.clock
    while queue.clock <= began + MAX_BATCHES_SINCE_SMALL * 2048:
        take(queue, 2048, 100)
    assert len(take(queue, 2048, 100)) == 2048 // 34, "none has come for long"


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


def test_planned_batches_are_taken_whole_in_order_when_no_other_row_waits():
    queue = Scheduler()
    first, second = ([entry(40, planned=number) for _ in range(2)] for number in (1, 2))
    other = entry(60)
    for rows in (first, second, [other]):
        queue.put_nowait(*rows)
    assert (len(queue), queue.tokens) == (1, 60), "planned rows do not count as waiting"
    assert list(queue) == [other, *first, *second], "rows that fail with the engine"
    assert [take_any(queue, 64) for _ in range(4)] == [[other], first, second, []]


def test_while_long_rows_are_left_to_other_threads_none_is_taken():
    queue = Scheduler()
    short = [entry(200) for _ in range(8)]
    queue.put_nowait(*short)  # long rows are kept together on account of short ones
    while take_any(queue, 2048):
        """Take the short ones."""
    long, planned = entry(1000), entry(3, planned=1)
    queue.put_nowait(long)
    queue.put_nowait(planned)
    assert take_any(queue, 2048, leaves_long=True) == []
    assert take_any(queue, 2048) == [long]
    assert take_any(queue, 2048, leaves_long=True) == [planned]


def test_withdrawn_rows_are_computed_with_their_batch_until_all_are_withdrawn():
    queue = Scheduler()
    batch = [entry(3, planned=1) for _ in range(2)]
    queue.put_nowait(*batch)
    batch[0].is_abandoned = True
    queue.withdraw(batch[0])
    assert [*queue.planned.values()] == [batch]
    batch[1].is_abandoned = True
    queue.withdraw(batch[1])
    assert not queue.planned
    assert take_any(queue, 64) == []


# -- whatever happens: queue, fairness and admission against a list, in whichever order ---------------

TOKENS = st.sampled_from([1, 2, 3, 16, 17, 34, 100, 255, 256, 257, 400, 512, 3000]) | st.integers(1, 600)

PRIORITIES = st.sampled_from([0, 0, 0, -1, 1, 2**63 - 1, -(2**63)])

BUDGETS = st.sampled_from([1, 64, 512, 2048, 16_384])


CLIENTS = [Client("a"), Client("b"), Client("trusted", may_outrank=True)]

SENDERS = st.sampled_from(CLIENTS)

KEYS = st.sampled_from(["", "", "images"])

SECOND_PER_TOKEN = np.ones(WORK_CLASSES)


def row_of(tokens: int, priority: int, group: int, client: Client, key: str) -> QueueEntry:
    work = EstimatedWork(tokens=tokens, client=client, priority=priority)
    prompt = RenderedPrompt(np.ones(tokens, dtype=np.int32))
    group = group and group + 10 * CLIENTS.index(client)  # a request has one client
    request = PoolingRequest(prompt, priority=priority, group=group, client=client.number, rank=work.rank)
    return QueueEntry(request, key=key)


class QueueModel(RuleBasedStateMachine):
    """The queue, and what it must hold as a list."""

    entries = Bundle("entries")

    def __init__(self) -> None:
        super().__init__()
        self.queue = Scheduler()
        self.waiting: list[QueueEntry] = []
        self.arrived: dict[QueueEntry, int] = {}
        """Its client's clock at the arrival of each entry that was ever put."""
        self.gone: Counter[QueueEntry] = Counter()
        """How often each one was taken or withdrawn."""
        self.put_of_group: Counter[int] = Counter()
        """Tokens put for each group since it last had none that wait."""
        self.taken_tokens = 0
        self.virtual_times: dict[int, int] = {}
        """Of the clients that have rows waiting: where each began, plus the tokens taken of it."""
        self.least_virtual_time = 0
        rates = ComputeRates()
        rates.shared = SECOND_PER_TOKEN
        self.admission = Admission(math.inf, rates, margin=1.0)
        self.admitted: dict[QueueEntry, ExitStack] = {}

    def put(self, entry: QueueEntry) -> QueueEntry:
        request = entry.request
        self.arrived[entry] = self.virtual_times.setdefault(request.client, self.least_virtual_time)
        self.admit(entry)
        self.queue.put_nowait(entry)
        self.waiting.append(entry)
        self.put_of_group[request.group] += request.tokens
        before = self.put_of_group[request.group] if request.group else request.tokens
        wait = entry.virtual_deadline - self.arrived[entry]
        assert FAIRNESS * request.tokens <= wait < 2 * FAIRNESS * before, (
            "neither early nor later than its group allows"
        )
        return entry

    def admit(self, entry: QueueEntry) -> None:
        """Admit a row as a request. How long it waits is tested in ``test_admission``."""
        request = entry.request
        (client,) = (client for client in CLIENTS if client.number == request.client)
        work = EstimatedWork(tokens=request.tokens, client=client, priority=request.priority)
        waits_for = self.admission.wait_s(work)
        assert 0 <= waits_for <= COMES_AGAIN * self.queue.tokens * (1 + 1e-9)
        if request.rank > 0:
            assert waits_for == pytest.approx(self.queue.tokens)
        self.admitted[entry] = ExitStack()
        self.admitted[entry].enter_context(self.admission.admit(work))

    def go(self, entry: QueueEntry) -> None:
        """Count that an entry has left, which it does once."""
        self.admitted.pop(entry).close()
        self.waiting.remove(entry)
        if entry.request.client not in {other.request.client for other in self.waiting}:
            del self.virtual_times[entry.request.client]
        self.gone[entry] += 1
        if entry.request.group not in {other.request.group for other in self.waiting}:
            del self.put_of_group[entry.request.group]

    @rule(target=entries, tokens=TOKENS, priority=PRIORITIES, client=SENDERS, key=KEYS)
    def put_a_row(self, tokens: int, priority: int, client: Client, key: str) -> QueueEntry:
        return self.put(row_of(tokens, priority, 0, client, key))

    @rule(
        target=entries,
        lengths=st.lists(TOKENS, min_size=1, max_size=20),
        priority=PRIORITIES,
        group=st.integers(1, 4),
        client=SENDERS,
        keys=st.lists(KEYS, min_size=20, max_size=20),
    )
    def put_rows_of_a_request(self, lengths: list[int], priority: int, group: int, client: Client, keys: list[str]):
        rows = [row_of(tokens, priority, group, client, key) for tokens, key in zip(lengths, keys, strict=False)]
        return multiple(*map(self.put, rows))

    @rule(entry=entries)
    def withdraw(self, entry: QueueEntry) -> None:
        """Whether or not it still waits."""
        if entry in self.waiting:
            self.go(entry)
        self.queue.withdraw(entry)
        self.queue.withdraw(entry)

    @rule(entry=consumes(entries))
    def withdraw_for_good(self, entry: QueueEntry) -> None:
        self.withdraw(entry)

    @rule(max_tokens=BUDGETS, short_batch_tokens=st.none() | BUDGETS, leaves_long=st.booleans(), pads=st.booleans())
    def take_a_batch(self, max_tokens: int, short_batch_tokens: int | None, leaves_long: bool, pads: bool) -> None:
        before = [*self.waiting]
        taken = self.queue.take(BatchLimits(max_tokens, short_batch_tokens, pads), leaves_long=leaves_long)
        virtual_times = dict(self.virtual_times)
        for entry in taken:
            self.virtual_times[entry.request.client] += entry.request.tokens
        last_virtual_time = self.virtual_times[taken[0].request.client] if taken else 0
        for entry in taken:
            self.go(entry)
        self.taken_tokens += sum(entry.request.tokens for entry in taken)
        if not taken:
            assert not before or (leaves_long and all(entry.request.tokens > SHORT_TOKENS for entry in before))
            return
        least = min(self.virtual_times.values(), default=last_virtual_time)
        self.least_virtual_time = max(self.least_virtual_time, least)
        assert {entry.key for entry in taken} == {taken[0].key}
        self.check_turn(taken, before, virtual_times, leaves_long=leaves_long)
        self.check_budget(taken, max_tokens, pads=pads)

    def check_turn(
        self, taken: list[QueueEntry], before: list[QueueEntry], virtual_times: dict[int, int], *, leaves_long: bool
    ) -> None:
        """The right row of the right client opens the batch, and no other comes before one that is more urgent."""
        opening = taken[0].request
        candidates = [entry for entry in before if not (leaves_long and entry.request.tokens > SHORT_TOKENS)]
        if opening.tokens > SHORT_TOKENS:
            candidates = before
        for other in (entry.request for entry in candidates):
            assert opening.rank <= other.rank
            if opening.rank == other.rank:
                assert virtual_times[opening.client] <= virtual_times[other.client]
        for other in candidates:
            if (other.request.client, other.request.rank) == (opening.client, opening.rank):
                assert opening.priority <= other.request.priority
                if opening.priority == other.request.priority:
                    assert taken[0].virtual_deadline <= other.virtual_deadline
                    assert self.arrived[taken[0]] < other.virtual_deadline, "it came too late to be before the other"
        ranks = [entry.request.rank for entry in taken]
        assert ranks == sorted(ranks)
        for client in CLIENTS:
            for rank in set(ranks):
                of_client = [
                    entry.request.priority
                    for entry in taken
                    if (entry.request.client, entry.request.rank) == (client.number, rank)
                ]
                assert of_client == sorted(of_client)

    def check_budget(self, taken: list[QueueEntry], max_tokens: int, *, pads: bool) -> None:
        batch = InFlightBatch(taken).batch
        if len(taken) == 1:
            return
        if pads:
            free = max_tokens // FREE_PADDING_DIVISOR
            assert batch.padded_tokens <= max_tokens
            assert batch.padded_tokens - batch.tokens <= max(free, MAX_PADDING_SHARE * batch.padded_tokens)
        else:
            assert batch.tokens <= max_tokens

    @invariant()
    def holds_what_waits(self) -> None:
        queue = self.queue
        assert len(queue) == len(self.waiting)
        assert Counter(queue) == Counter(self.waiting)
        assert queue.tokens == sum(entry.request.tokens for entry in self.waiting)
        assert queue.clock == self.taken_tokens
        assert self.admission.tokens == queue.tokens

    @invariant()
    def each_leaves_once(self) -> None:
        assert not self.gone or max(self.gone.values()) == 1
        assert len(self.arrived) == len(self.waiting) + len(self.gone)

    def teardown(self) -> None:
        """Everything that waits is taken in the end, and nothing of it is left behind."""
        for _ in range(len(self.waiting)):
            self.take_a_batch(2048, None, leaves_long=False, pads=True)
        self.holds_what_waits()
        self.each_leaves_once()
        assert not self.waiting
        assert repr(self.queue) == "<Scheduler 0 rows, 0 tokens>"
        assert not self.queue._groups
        assert not self.queue._clients
        assert not self.admission.sizes


@pytest.mark.parametrize(("examples", "steps"), [(60, 40), pytest.param(250, 60, marks=pytest.mark.slow)])
def test_the_queue_does_what_a_list_would(examples: int, steps: int):
    quiet = settings(max_examples=examples, stateful_step_count=steps, suppress_health_check=list(HealthCheck))
    run_state_machine_as_test(QueueModel, settings=quiet)
