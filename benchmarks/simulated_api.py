"""An API process of a simulated cluster: the real admission, routing and links, without connections."""

import random
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np
from attrs import define, field

from benchmarks.simulated_engine import News, SimulatedEngine
from benchmarks.simulated_scenario import Scenario
from trio_pool_serve.config import SchedulingConfig
from trio_pool_serve.engine.admission import AdmittedRequest
from trio_pool_serve.engine.queue_entry import QueueEntry, by_submitter, finish_together
from trio_pool_serve.engine.remote.connectors import UnixConnector
from trio_pool_serve.engine.remote.link import Link
from trio_pool_serve.engine.remote.process_engine import ProcessEngine
from trio_pool_serve.engine.remote.routing import Routing
from trio_pool_serve.engine.remote.wire import Hello
from trio_pool_serve.engine.waiting_work import WaitingWork
from trio_pool_serve.telemetry.metrics import Metrics
from trio_pool_serve.types import Client, PoolingOutput, PoolingRequest

OUTPUT: PoolingOutput = (np.zeros(1, np.float32),)
"""Of every row."""

HELLO = Hello(dimensions=1, embeds_width=0, max_batch_tokens=1)


@define(eq=False)
class SeededEngine(ProcessEngine):
    """Routes rows the same way every time, and tells how many rows were lost."""

    on_lost_rows: Callable[[int], None] = field(kw_only=True)
    seed: float = field(kw_only=True)

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        self._routing = Routing(random=random.Random(self.seed))

    def lose(self, link: Link, lost: Sequence[QueueEntry]) -> None:
        """Count the rows, then do what is always done."""
        self.on_lost_rows(len(lost))
        super().lose(link, lost)


@define(eq=False)
class SimulatedLink(Link):
    """Knows of its engine what the engine has told it; ``on_unsent`` is called when it begins to have rows to send."""

    remote: SimulatedEngine = field(kw_only=True)
    on_unsent: Callable[["SimulatedLink"], None] = field(kw_only=True)
    generation: int = field(default=-1, init=False)
    """Of the engine's processes, the one that it is connected to."""

    def connect(self, now: float) -> None:
        """Use the engine from now on."""
        self.generation = self.remote.generation
        self._last_heard = now
        self._begin(HELLO)

    @property
    def heard_at(self) -> float:
        """When it has heard of its engine last."""
        return self._last_heard

    def send_nowait(self, entry: QueueEntry) -> None:
        """Send a row soon."""
        if not self._unsent:
            self.on_unsent(self)
        super().send_nowait(entry)

    def take_unsent(self) -> list[QueueEntry]:
        """Return the rows that are to be sent."""
        unsent, self._unsent = self._unsent, {}
        return list(unsent.values())

    def lose(self) -> None:
        """Find that the engine has been silent for too long."""
        self.generation = -1
        self._lose()

    def hear(self, generation: int, news: News, now: float) -> bool:
        """Take what an engine says of itself, and return whether this is the process that it is connected to."""
        if self.generation != generation:
            return False
        self._last_heard = now
        self.tokens_per_s, self.seconds_per_token = news.tokens_per_s, news.seconds_per_token
        self._others_tokens = max(0, news.waiting_tokens - self.own_tokens)
        return True

    def answer(self, generation: int, entries: Sequence[QueueEntry], news: News, now: float) -> None:
        """Settle rows as ``Link`` does, then take what the engine says of itself."""
        if self.generation != generation:
            return
        there = [entry for entry in entries if self._waiting.get(entry.number) is entry]
        for together in by_submitter([(entry, OUTPUT) for entry in there]):
            finish_together([outcome for outcome in together if self._settle(outcome[0].number) is not None])
        self.hear(generation, news, now)


@define(eq=False)
class ApiProcess:
    """An event loop: it begins one request after the other."""

    scenario: Scenario
    waiting_work: WaitingWork
    engine: SeededEngine
    is_busy: bool = field(default=False, init=False)
    unread: "deque[SimulatedRequest]" = field(init=False, factory=deque)

    @classmethod
    def open(
        cls, scenario: Scenario, waiting_work: WaitingWork, seed: float, on_lost_rows: Callable[[int], None]
    ) -> "ApiProcess":
        """Return one without links."""
        engine = SeededEngine(
            (),
            Metrics().of_engine("m"),
            SchedulingConfig(max_queue_s=scenario.max_queue_s),
            waiting_work,
            retries_lost=scenario.retries_lost,
            on_lost_rows=on_lost_rows,
            seed=seed,
        )
        return cls(scenario, waiting_work, engine)

    def link_to(self, remote: SimulatedEngine, on_unsent: Callable[[SimulatedLink], None]) -> SimulatedLink:
        """Return a link to an engine."""
        connector = UnixConnector(Path(str(remote.position)))  # which is never asked to connect
        connector.timeout_s = self.scenario.link_timeout_s
        engine = self.engine
        return SimulatedLink(
            connector,
            engine.add_ready,
            engine.lose,
            position=remote.position,
            remote=remote,
            on_unsent=on_unsent,
        )


@define(eq=False)
class SimulatedRequest:
    """A request with its rows; ``on_end`` is called once, with an error or without."""

    client: Client
    arrived: float
    requests: Sequence[PoolingRequest]
    on_end: Callable[["SimulatedRequest", Exception | None], None]
    admitted: AdmittedRequest | None = field(default=None, init=False)
    _admission: AbstractContextManager[AdmittedRequest] | None = field(default=None, init=False)
    rows: list[QueueEntry] = field(init=False)
    _left: int = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.rows = [QueueEntry(request, self.settled, self.arrived) for request in self.requests]
        self._left = len(self.rows)

    @property
    def tokens(self) -> int:
        """Of all rows."""
        return sum([entry.request.tokens for entry in self.rows])

    def begin(self, admission: AbstractContextManager[AdmittedRequest]) -> None:
        """Be admitted. Raises ``OverloadedError``."""
        admitted = admission.__enter__()
        self.admitted, self._admission = admitted, admission
        admitted.note_rendered([entry.request.prompt for entry in self.rows], len(self.rows))

    def settled(self, entries: Sequence[QueueEntry]) -> None:
        """Count rows that are computed; end with the last one, or the first that fails."""
        if self.admitted is None:
            return
        for entry in entries:
            if entry.error is not None:
                self.end(entry.error)
                return
            self.admitted.note_computed(entry.request.prompt)
        self._left -= len(entries)
        if not self._left:
            self.end(None)

    def end(self, error: Exception | None) -> None:
        """Count as admitted no longer; rows that are not computed are of no use any more."""
        assert self._admission is not None
        self.admitted = None
        self._admission.__exit__(None, None, None)
        if error is not None:
            for entry in self.rows:
                if entry.link is not None and not entry.is_settled:
                    entry.link.withdraw(entry)
                    entry.link.remote.withdraw(entry)
        self.on_end(self, error)
