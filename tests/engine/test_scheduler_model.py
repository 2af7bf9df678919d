"""Queue, fairness and admission against a list: whatever is put, withdrawn and taken in whichever order."""

import math
from collections import Counter
from contextlib import ExitStack

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from trio_pool_serve.engine.admission import COMES_AGAIN, Admission, EstimatedWork
from trio_pool_serve.engine.batching import FREE_PADDING_DIVISOR, MAX_PADDING_SHARE, BatchLimits
from trio_pool_serve.engine.compute_rates import WORK_CLASSES
from trio_pool_serve.engine.device import InFlightBatch
from trio_pool_serve.engine.queue_entry import QueueEntry
from trio_pool_serve.engine.scheduler import Scheduler
from trio_pool_serve.engine.waiting_rows import FAIRNESS, SHORT_TOKENS
from trio_pool_serve.types import Client, PoolingRequest, RenderedPrompt

pytestmark = pytest.mark.unit

TOKENS = st.sampled_from([1, 2, 3, 16, 17, 34, 100, 255, 256, 257, 400, 512, 3000]) | st.integers(1, 600)

PRIORITIES = st.sampled_from([0, 0, 0, -1, 1, 2**63 - 1, -(2**63)])

BUDGETS = st.sampled_from([1, 64, 512, 2048, 16_384])


CLIENTS = [Client("a"), Client("b"), Client("trusted", may_outrank=True)]

SENDERS = st.sampled_from(CLIENTS)

KEYS = st.sampled_from(["", "", "images"])

SECOND_PER_TOKEN = np.ones(WORK_CLASSES)


def row(tokens: int, priority: int, group: int, client: Client, key: str) -> QueueEntry:
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
        self.admission = Admission(math.inf, lambda: SECOND_PER_TOKEN, margin=1.0)
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
        return self.put(row(tokens, priority, 0, client, key))

    @rule(
        target=entries,
        lengths=st.lists(TOKENS, min_size=1, max_size=20),
        priority=PRIORITIES,
        group=st.integers(1, 4),
        client=SENDERS,
        keys=st.lists(KEYS, min_size=20, max_size=20),
    )
    def put_rows_of_a_request(self, lengths: list[int], priority: int, group: int, client: Client, keys: list[str]):
        rows = [row(tokens, priority, group, client, key) for tokens, key in zip(lengths, keys, strict=False)]
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


def run_model(examples: int, steps: int) -> None:
    from hypothesis.stateful import run_state_machine_as_test

    quiet = settings(max_examples=examples, stateful_step_count=steps, suppress_health_check=list(HealthCheck))
    run_state_machine_as_test(QueueModel, settings=quiet)


def test_the_queue_does_what_a_list_would():
    run_model(examples=60, steps=40)


@pytest.mark.slow
def test_the_queue_does_what_a_list_would_for_long():
    run_model(examples=500, steps=60)
