"""Which rows of the batches of several API processes are computed together."""

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from attrs import define, field
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from trio_pool_serve.engine.batching import FREE_PADDING_DIVISOR, MAX_PADDING_SHARE, BatchLimits
from trio_pool_serve.engine.device import InFlightBatch
from trio_pool_serve.engine.queue_classes import SHORT_TOKENS
from trio_pool_serve.engine.queue_entry import QueueEntry
from trio_pool_serve.engine.remote.joiner import Joiner, SentBatch
from trio_pool_serve.engine.remote.wire import BatchFacts, QueueState
from trio_pool_serve.types import PoolingOutput, PoolingRequest, RenderedPrompt

pytestmark = pytest.mark.unit

numbers = itertools.count()


@define(eq=False)
class Sender:
    """An API process, as far as the joiner knows it: what it has sent, and what has come back."""

    joiner: Joiner
    settled: list[QueueEntry] = field(init=False, factory=list)
    done: list[SentBatch] = field(init=False, factory=list)

    def send(self, lengths, rank=0, clients=1, key="", *, planned=False, suspect=False) -> list[QueueEntry]:
        facts = BatchFacts(
            next(numbers), len(lengths), key, rank, QueueState(0, clients), is_planned=planned, is_suspect=suspect
        )
        batch = SentBatch(facts, self.note_settled)
        entries = [
            QueueEntry(
                PoolingRequest(RenderedPrompt(np.ones(tokens, np.int32))), batch.settle, holder=batch, tokens=tokens
            )
            for tokens in lengths
        ]
        batch.rows.update(dict.fromkeys(entries))
        self.joiner.put_nowait(batch)
        return entries

    def note_settled(self, batch: SentBatch, entries: Sequence[QueueEntry]) -> None:
        self.settled.extend(entries)
        if not batch.left:
            self.done.append(batch)


@pytest.fixture
def joiner() -> Joiner:
    return Joiner()


@pytest.fixture
def sender(joiner: Joiner) -> Sender:
    return Sender(joiner)


def test_processes_share_a_pass_by_their_clients(joiner, sender):
    many = sender.send([8] * 100, clients=3)
    few = sender.send([8] * 100, clients=1)
    taken = joiner.take(BatchLimits(320))
    assert (len([*filter(many.__contains__, taken)]), len([*filter(few.__contains__, taken)])) == (30, 10)


def test_the_smallest_rank_gets_all_but_one_row_of_each(joiner, sender):
    later = sender.send([8] * 100, rank=1)
    first = sender.send([8] * 100, rank=-1)
    taken = joiner.take(BatchLimits(320))
    assert taken[0] is first[0]
    assert [entry in later for entry in taken] == [False, True] + [False] * 38


def test_a_process_behind_others_is_first_when_they_have_sent_more(joiner, sender):
    """A batch that is taken in several passes does not delay later batches, and they do not delay it."""
    sender.send([512] * 6)
    short = sender.send([8] * 10)
    passes = []
    for _ in range(4):
        passes.append(joiner.take(BatchLimits(2048)))
        sender.send([512])
    assert [pass_ == short for pass_ in passes].count(True) == 1


def test_long_batches_are_left_to_other_threads_while_short_ones_come(joiner, sender):
    long, short = sender.send([SHORT_TOKENS + 1]), sender.send([64])
    assert joiner.take(BatchLimits(2048), leaves_long=True) == short
    assert joiner.take(BatchLimits(2048), leaves_long=True) == []
    assert joiner.take(BatchLimits(2048)) == long
    again = sender.send([SHORT_TOKENS + 1])
    assert joiner.take(BatchLimits(2048), leaves_long=True) == again, "short ones are less than an eighth of all"


LENGTHS = st.lists(st.sampled_from([1, 2, 8, 100, 255, 256, 257, 512, 3000]), min_size=1, max_size=12)


class JoinerModel(RuleBasedStateMachine):
    """The joiner against lists: whatever is sent, withdrawn and taken in whichever order."""

    entries = Bundle("entries")

    def __init__(self) -> None:
        super().__init__()
        self.joiner = Joiner()
        self.sender = Sender(self.joiner)
        self.waiting: list[QueueEntry] = []
        self.planned: list[list[QueueEntry]] = []
        self.taken: list[QueueEntry] = []
        self.withdrawn: set[QueueEntry] = set()
        self.sent = 0

    @rule(
        target=entries,
        lengths=LENGTHS,
        rank=st.integers(-1, 1),
        clients=st.integers(1, 5),
        key=st.sampled_from(["", "images"]),
        suspect=st.booleans(),
    )
    def send(self, lengths, rank, clients, key, suspect):
        entries = self.sender.send(lengths[:1] if suspect else lengths, rank, clients, key, suspect=suspect)
        self.waiting += entries
        self.sent += 1
        return entries[-1]

    @rule(target=entries, lengths=LENGTHS)
    def send_planned(self, lengths):
        self.planned.append(self.sender.send(lengths, planned=True))
        self.sent += 1
        return self.planned[-1][-1]

    @rule(entry=entries, whole=st.booleans())
    def withdraw(self, entry, whole):
        batch = [other for other in [*self.waiting, *itertools.chain(*self.planned)] if other.holder is entry.holder]
        for each in batch if whole else [entry]:
            self.withdrawn.add(each)
            self.joiner.withdraw(each)
        self.waiting = [each for each in self.waiting if each not in self.withdrawn]
        self.planned = [rows for rows in self.planned if not self.withdrawn.issuperset(rows)]

    @rule(max_tokens=st.sampled_from([1, 16, 512, 2048]), pads=st.booleans(), leaves_long=st.booleans())
    def take(self, max_tokens, pads, leaves_long):
        waiting, turns = self.waiting, [*self.joiner._batches]
        taken = self.joiner.take(BatchLimits(max_tokens, None, pads), leaves_long=leaves_long)
        self.taken += taken
        self.waiting = [entry for entry in waiting if entry not in taken]
        if not taken:
            assert leaves_long or not waiting
            return
        batches = {entry.holder for entry in taken}
        first = taken[0].holder
        assert len({batch.facts.key for batch in batches}) == 1
        assert len(batches) == 1 or not any(batch.facts.is_suspect for batch in batches)
        assert not any(batch.facts.is_planned for batch in batches)
        firsts = {entry.holder: entry for entry in reversed(waiting)}
        if leaves_long and all(firsts[batch].tokens <= SHORT_TOKENS for batch in batches):  # else none were left
            firsts = {batch: row for batch, row in firsts.items() if row.tokens <= SHORT_TOKENS}
        assert first.facts.rank == min(batch.facts.rank for batch in firsts)
        for batch in batches:
            of_batch = [entry for entry in waiting if entry.holder is batch]
            of_taken = [entry for entry in taken if entry.holder is batch]
            assert of_taken == of_batch[: len(of_taken)], "in order"
        for batch, row in firsts.items():
            if (
                batch not in batches
                and batch.facts.key == first.facts.key
                and not (batch.facts.is_suspect or first.facts.is_suspect)
            ):
                # One row of each is in, unless it does not fit beside those of the batches before it.
                place = batch.facts.rank, turns.index(batch)
                before = [firsts[other] for other in batches if (other.facts.rank, turns.index(other)) < place]
                assert not self.fits([*before, row], max_tokens, pads=pads)
        assert len(taken) == 1 or self.fits(taken, max_tokens, pads=pads)

    def fits(self, rows, max_tokens: int, *, pads: bool) -> bool:
        batch = InFlightBatch(rows).batch
        if not pads:
            return batch.tokens <= max_tokens
        padding = batch.padded_tokens - batch.tokens
        most = max(max_tokens // FREE_PADDING_DIVISOR, MAX_PADDING_SHARE * batch.padded_tokens)
        return batch.padded_tokens <= max_tokens and padding <= most

    @rule()
    def take_planned(self):
        taken = self.joiner.take_planned()
        assert taken == (self.planned.pop(0) if self.planned else [])
        self.taken += taken

    @rule(count=st.integers(1, 20))
    def settle(self, count):
        for entry in self.taken[:count]:
            entry.output = PoolingOutput((), 0.0, 0.0, 0.0)
            entry.settled([entry])
        del self.taken[:count]

    @invariant()
    def counts_are_true(self):
        assert len(self.joiner) == len(self.waiting)
        assert self.joiner.tokens == sum(entry.tokens for entry in self.waiting)
        assert len({*self.sender.done}) == len(self.sender.done), "each is done once"
        left = {entry.holder for entry in [*self.waiting, *self.taken, *itertools.chain(*self.planned)]}
        assert len(self.sender.done) == self.sent - len(left)
        assert self.sender.done == [] or max(batch.left for batch in self.sender.done) == 0

    def teardown(self):
        assert {*self.joiner.take_all()} == {*self.waiting, *itertools.chain(*self.planned)}
        assert (len(self.joiner), self.joiner.tokens, self.joiner.take_planned()) == (0, 0, [])


def test_short_rows_are_joined_with_long_ones_that_are_more_than_may_be_left():
    state = JoinerModel()
    for length in (1, 257, 3000, 255):
        state.send(clients=1, key="", lengths=[length], rank=0, suspect=False)
    state.take(leaves_long=True, max_tokens=512, pads=False)
    assert [entry.tokens for entry in state.taken] == [1, 257]


@pytest.mark.parametrize(("examples", "steps"), [(60, 30), pytest.param(250, 50, marks=pytest.mark.slow)])
def test_the_joiner_does_what_lists_would(examples, steps):
    quiet = settings(max_examples=examples, stateful_step_count=steps, suppress_health_check=list(HealthCheck))
    run_state_machine_as_test(JoinerModel, settings=quiet)
