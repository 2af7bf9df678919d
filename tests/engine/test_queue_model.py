"""The queue against a list: whatever is put, withdrawn and taken in whichever order."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from trio_pool_serve.engine.batching import FREE_PADDING_DIVISOR, MAX_PADDED_FACTOR, MAX_PADDING_SHARE
from trio_pool_serve.engine.queue import FAIRNESS, QueueEntry, RequestQueue, batch_of, is_long
from trio_pool_serve.types import PoolingRequest, RenderedPrompt

pytestmark = pytest.mark.unit

TOKENS = st.sampled_from([1, 2, 3, 16, 17, 34, 100, 255, 256, 257, 400, 512, 3000]) | st.integers(1, 600)

PRIORITIES = st.sampled_from([0, 0, 0, -1, 1, 2**63 - 1, -(2**63)])

BUDGETS = st.sampled_from([1, 64, 512, 2048, 16_384])


def row(tokens: int, priority: int, group: int) -> QueueEntry:
    return QueueEntry(PoolingRequest(RenderedPrompt(np.ones(tokens, dtype=np.int32)), priority=priority, group=group))


class QueueModel(RuleBasedStateMachine):
    """The queue, and what it must hold as a list."""

    entries = Bundle("entries")

    def __init__(self) -> None:
        super().__init__()
        self.queue = RequestQueue()
        self.waiting: list[QueueEntry] = []
        self.arrived: dict[QueueEntry, int] = {}
        """The queue's clock at the arrival of each entry that was ever put."""
        self.gone: Counter[QueueEntry] = Counter()
        """How often each one was taken or withdrawn."""
        self.put_of_group: Counter[int] = Counter()
        """Tokens put for each group since it last had none that wait."""
        self.taken_tokens = 0

    def put(self, entry: QueueEntry) -> QueueEntry:
        request = entry.request
        self.arrived[entry] = self.queue.clock
        self.queue.put_nowait(entry)
        self.waiting.append(entry)
        self.put_of_group[request.group] += request.tokens
        before = self.put_of_group[request.group] if request.group else request.tokens
        wait = entry.virtual_deadline - self.arrived[entry]
        assert FAIRNESS * request.tokens <= wait < 2 * FAIRNESS * before, (
            "neither early nor later than its group allows"
        )
        return entry

    def go(self, entry: QueueEntry) -> None:
        """Count that an entry has left, which it does once."""
        self.waiting.remove(entry)
        self.gone[entry] += 1
        if entry.request.group not in {other.request.group for other in self.waiting}:
            del self.put_of_group[entry.request.group]

    @rule(target=entries, tokens=TOKENS, priority=PRIORITIES)
    def put_a_row(self, tokens: int, priority: int) -> QueueEntry:
        return self.put(row(tokens, priority, group=0))

    @rule(
        target=entries,
        lengths=st.lists(TOKENS, min_size=1, max_size=20),
        priority=PRIORITIES,
        group=st.integers(1, 4),
    )
    def put_rows_of_a_request(self, lengths: list[int], priority: int, group: int):
        return multiple(*(self.put(row(tokens, priority, group)) for tokens in lengths))

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

    @rule(max_tokens=BUDGETS, bulk_tokens=st.none() | BUDGETS, leaves_long=st.booleans(), pads=st.booleans())
    def take_a_batch(self, max_tokens: int, bulk_tokens: int | None, leaves_long: bool, pads: bool) -> None:
        self.queue.pads = pads
        before = list(self.waiting)
        taken = self.queue.take_batch(max_tokens, bulk_tokens, leaves_long=leaves_long)
        for entry in taken:
            self.go(entry)
        self.taken_tokens += sum(entry.request.tokens for entry in taken)
        if not taken:
            assert not before or (leaves_long and all(is_long(entry.request) for entry in before))
            return
        self.check_turn(taken, before, leaves_long=leaves_long)
        self.check_budget(taken, max_tokens, pads=pads)

    def check_turn(self, taken: list[QueueEntry], before: list[QueueEntry], *, leaves_long: bool) -> None:
        """The right entry opens the batch, and none of a larger number of priority comes before one of a smaller."""
        opening = taken[0]
        candidates = [entry for entry in before if not (leaves_long and is_long(entry.request))]
        if is_long(opening.request):
            candidates = before
        for other in candidates:
            assert opening.request.priority <= other.request.priority
            if opening.request.priority == other.request.priority:
                assert opening.virtual_deadline <= other.virtual_deadline
                assert self.arrived[opening] < other.virtual_deadline, "it came too late to be before the other one"
        priorities = [entry.request.priority for entry in taken]
        assert priorities == sorted(priorities)

    def check_budget(self, taken: list[QueueEntry], max_tokens: int, *, pads: bool) -> None:
        batch = batch_of(taken)
        if len(taken) == 1:
            return
        if pads:
            free = max_tokens // FREE_PADDING_DIVISOR
            assert batch.padded_tokens <= max_tokens
            assert batch.padded_tokens - batch.tokens <= max(free, MAX_PADDING_SHARE * batch.padded_tokens)
        else:
            assert batch.tokens <= max_tokens
            assert batch.padded_tokens <= MAX_PADDED_FACTOR * max_tokens

    @invariant()
    def holds_what_waits(self) -> None:
        queue = self.queue
        assert len(queue) == len(self.waiting)
        assert Counter(queue) == Counter(self.waiting)
        assert queue.tokens == sum(entry.request.tokens for entry in self.waiting)
        assert queue.clock == self.taken_tokens

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
        assert repr(self.queue) == "<RequestQueue 0 rows, 0 tokens>"
        assert not self.queue._groups
        assert not self.queue._classes


def run_model(examples: int, steps: int) -> None:
    from hypothesis.stateful import run_state_machine_as_test

    quiet = settings(max_examples=examples, stateful_step_count=steps, suppress_health_check=list(HealthCheck))
    run_state_machine_as_test(QueueModel, settings=quiet)


def test_the_queue_does_what_a_list_would():
    run_model(examples=60, steps=40)


@pytest.mark.slow
def test_the_queue_does_what_a_list_would_for_long():
    run_model(examples=1500, steps=80)
