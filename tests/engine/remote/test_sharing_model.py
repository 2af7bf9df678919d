"""API processes with queues of their own at one device server, in whichever order things happen."""

import itertools
from collections import Counter

import numpy as np
import pytest
from attrs import define, field
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from trio_pool_serve.engine.batching import FREE_PADDING_DIVISOR, MAX_PADDING_SHARE, BatchLimits
from trio_pool_serve.engine.device import InFlightBatch
from trio_pool_serve.engine.queue_entry import QueueEntry
from trio_pool_serve.engine.remote.joiner import Joiner, SentBatch
from trio_pool_serve.engine.remote.wire import BatchFacts, QueueState
from trio_pool_serve.engine.scheduler import Scheduler
from trio_pool_serve.errors import BatchFailedError
from trio_pool_serve.types import Embed, PoolingRequest, RenderedPrompt

pytestmark = pytest.mark.unit

CREDITS = 2

LIMITS = BatchLimits(512)

NUMBERS = itertools.count()


@define(eq=False)
class ApiProcess:
    """Its queue, and the batches that it has at the device server."""

    queue: Scheduler = field(factory=Scheduler)
    sent: dict[SentBatch, list[QueueEntry]] = field(factory=dict)


class SharingModel(RuleBasedStateMachine):
    """Every row is computed once, unless its process dies; batches are bounded by credits, passes by the budget."""

    def __init__(self) -> None:
        super().__init__()
        self.joiner = Joiner()
        self.processes = [ApiProcess() for _ in range(3)]
        self.put: set[int] = set()
        self.computed: Counter[int] = Counter()
        self.computing: list[list[QueueEntry]] = []

    @rule(
        process=st.integers(0, 2),
        lengths=st.lists(st.sampled_from([1, 16, 17, 100, 400, 600]), max_size=20),
        key=st.sampled_from(["", "", "images"]),
        client=st.integers(1, 2),
        rank=st.sampled_from([0, 0, 1]),
    )
    def rows_arrive(self, process: int, lengths: list[int], key: str, client: int, rank: int) -> None:
        for length in lengths:
            request = PoolingRequest(RenderedPrompt(np.ones(length, np.int32)), (Embed(),), client=client, rank=rank)
            entry = QueueEntry(request, number=next(NUMBERS), key=key)
            self.processes[process].queue.put_nowait(entry)
            self.put.add(entry.number)

    @rule(process=st.integers(0, 2))
    def send(self, process: int) -> None:
        """As the dispatcher does when there is a credit."""
        sender = self.processes[process]
        if len(sender.sent) >= CREDITS or not (rows := sender.queue.take(LIMITS)):
            return
        first = rows[0]
        clients = {row.request.client for row in sender.queue}
        state = QueueState(0, max(1, len(clients)))
        facts = BatchFacts(len(sender.sent), len(rows), first.key, first.request.rank, state)
        batch = SentBatch(facts, lambda batch, _: None if batch.left else sender.sent.pop(batch))
        for row in rows:
            entry = QueueEntry(row.request, batch.settle, number=row.number, holder=batch, tokens=row.tokens)
            batch.rows[entry] = None
        sender.sent[batch] = [*batch.rows]
        self.joiner.put_nowait(batch)

    @precondition(lambda self: len(self.joiner))
    @rule(pads=st.booleans())
    def launch(self, pads: bool) -> None:
        waiting = [batch for each in self.processes for batch in each.sent if batch.rows]
        first = min(waiting, key=lambda each: each.facts.rank)
        rows = self.joiner.take(BatchLimits(LIMITS.max_tokens, pads=pads))
        assert rows
        assert first.facts.rank == min(row.holder.facts.rank for row in rows)
        assert len({row.holder.facts.key for row in rows}) == 1
        batch = InFlightBatch(rows).batch
        computed = batch.padded_tokens if pads else batch.tokens
        if len(rows) > 1:
            assert computed <= LIMITS.max_tokens
            padding = computed - batch.tokens
            assert padding <= max(LIMITS.max_tokens // FREE_PADDING_DIVISOR, MAX_PADDING_SHARE * computed)
        self.computing.append(rows)

    @precondition(lambda self: self.computing)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        rows = self.computing.pop(data.draw(st.integers(0, len(self.computing) - 1)))
        self.computed.update(row.number for row in rows)
        for row in rows:
            row.fail(BatchFailedError("It counts as computed."))

    @rule(process=st.integers(0, 2))
    def die(self, process: int) -> None:
        """Another process takes its place."""
        dying, self.processes[process] = self.processes[process], ApiProcess()
        self.put -= {row.number for row in dying.queue.take_all()}
        for batch, rows in [*dying.sent.items()]:
            waiting = {row.number for row in batch.rows}
            for row in rows:
                if not row.is_settled:
                    self.joiner.withdraw(row)
            assert not batch.rows
            self.put -= waiting

    @rule(process=st.integers(0, 2), data=st.data())
    def withdraw(self, process: int, data: st.DataObject) -> None:
        sent = [(row, batch) for batch, rows in self.processes[process].sent.items() for row in rows]
        if not sent:
            return
        row, batch = data.draw(st.sampled_from(sent))
        if row.is_settled or row.is_abandoned:
            return
        if row in batch.rows:
            self.put.discard(row.number)
        self.joiner.withdraw(row)

    @invariant()
    def every_row_is_somewhere_once(self) -> None:
        assert all(times == 1 for times in self.computed.values())
        queued = [row.number for each in self.processes for row in each.queue]
        waiting = [row.number for each in self.processes for batch in each.sent for row in batch.rows]
        computing = [row.number for rows in self.computing for row in rows]
        assert Counter([*queued, *waiting, *computing, *self.computed]) == Counter(self.put)
        assert len(waiting) == len(self.joiner)
        assert all(len(each.sent) <= CREDITS for each in self.processes)
        assert all(batch.left for each in self.processes for batch in each.sent), "else its credit has returned"
        assert self.joiner.tokens == sum(
            row.tokens for each in self.processes for batch in each.sent for row in batch.rows
        )

    def teardown(self) -> None:
        """Once nothing else happens, all that waits is computed."""
        while self.joiner.tokens or self.computing or any(len(each.queue) for each in self.processes):
            for index in range(len(self.processes)):
                self.send(index)
            if rows := self.joiner.take(LIMITS):
                self.computing.append(rows)
            for rows in self.computing:
                self.computed.update(row.number for row in rows)
                for row in rows:
                    row.fail(BatchFailedError("It counts as computed."))
            self.computing.clear()
        assert set(self.computed) == self.put
        assert not any(each.sent for each in self.processes)


TestSharing = SharingModel.TestCase
