"""The engine whose models compute in engine processes."""

import math
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, closing
from typing import Any

import numpy as np
import trio
from attrs import define, field

from trio_pool_serve.config import SchedulingConfig
from trio_pool_serve.engine.admission import Admission, AdmittedRequest, EstimatedWork
from trio_pool_serve.engine.compute_rates import UNKNOWN, WORK_CLASSES, SecondsPerToken, rates_together, work_class
from trio_pool_serve.engine.engine import Engine, EngineState, EngineStatistics
from trio_pool_serve.engine.model_memory import ModelMemory
from trio_pool_serve.engine.queue_entry import QueueEntry
from trio_pool_serve.engine.remote.connectors import Connector
from trio_pool_serve.engine.remote.link import Link
from trio_pool_serve.engine.remote.routing import Routing, rate_of
from trio_pool_serve.engine.remote.wire import Hello
from trio_pool_serve.engine.waiting_work import WaitingWork
from trio_pool_serve.errors import EngineDeadError, EngineLoadingError, EngineProcessDiedError
from trio_pool_serve.telemetry.metrics import EngineMetrics
from trio_pool_serve.types import PlannedBatch, PoolingParams, PoolingRequest, QueryParams, QueryScope, RenderedPrompt

RATES_KEPT_S = 0.05
"""For so long the rates of several engines together, and what others wait for, are not computed again: that takes up to
a millisecond, as long as all of an ordinary request."""

MAX_TIMES_MEDIAN = 2.0
"""A host counts with a wait of at most so many times the median of all hosts, of two hosts the shorter one."""


@define(eq=False)
class ProcessEngine(Engine):
    """Sends each row to the engine process that will have computed it first: see ``Routing``.

    ``connectors`` are for the replicas of one model, which are there now or later, and are restarted elsewhere: the
    rows of one that dies fail, and while there is none the engine's state is loading. More links may join and leave.
    ``waiting`` is shared with the other API processes of this machine, so that all admit by what waits in all of them.
    """

    connectors: Sequence[Connector]
    metrics: EngineMetrics
    config: SchedulingConfig = field(factory=SchedulingConfig)
    waiting: WaitingWork = field(factory=WaitingWork)
    zone: str = field(default="", kw_only=True)
    _links: list[Link] = field(init=False)
    """Those of ``connectors``."""
    _routing: Routing = field(init=False)
    _admission: Admission = field(init=False)
    _dead: bool = field(default=False, init=False)
    _has_ready: trio.Event = field(init=False, factory=trio.Event)
    """Set once an engine process is ready, and if the engine dies before."""
    _rates: SecondsPerToken = field(default=UNKNOWN, init=False)
    _others_tokens: float = field(default=0.0, init=False)
    """Tokens that wait at hosts for other machines, when ``_rates`` were computed."""
    _rates_from: float = field(default=-math.inf, init=False)

    def __attrs_post_init__(self) -> None:
        self._links = [
            Link(connector, self.add_ready, self.lose, self.config.stall_timeout_s, self.config.max_queue_s, position)
            for position, connector in enumerate(self.connectors)
        ]
        self._routing = Routing(self.zone)
        self._admission = Admission(
            self.config.max_queue_s,
            self._seconds_per_token,
            self.waiting,
        )
        # The engine processes count everything else.
        self.metrics.add_gauges(
            lambda: {
                "engine": {
                    "admitted_tokens": self._admission.tokens,
                    "waiting_seconds": self._admission.waiting_s,
                }
            }
        )

    def add_ready(self, link: Link) -> None:
        """Use a link whose engine process is ready, one of this engine's own or another that has joined."""
        self._routing.add(link)
        self._rates_from = -math.inf
        self._has_ready.set()

    def lose(self, link: Link, lost: Sequence[QueueEntry]) -> None:
        """Do without a link; single rows that it had are sent to another, once, and the others fail."""
        self._routing.remove(link)
        self._rates_from = -math.inf
        if not self._routing.ready and not self._dead:
            self._has_ready = trio.Event()
        for entry in lost:
            if not self._sent_again(entry):
                entry.fail(EngineProcessDiedError(link.connector.loss))

    def _sent_again(self, entry: QueueEntry) -> bool:
        """Send a single row of a lost engine process to another, once, if that would not be in vain."""
        if entry.lost_before or not entry.request.is_alone or self._dead:
            return False
        if any(isinstance(param, QueryParams) for param in entry.request.params):
            return False  # the queries are lost, too
        candidates = self._routing.candidates()
        if not candidates:
            return False
        link = self._routing.choose(entry.request, candidates)
        rate = rate_of(link, work_class(entry.request.tokens)) or 0.0
        if trio.current_time() + link.waiting_tokens * rate >= entry.request.deadline:
            return False
        entry.lost_before = True
        link.send_nowait(entry)
        return True

    def submit_nowait(self, *entries: QueueEntry) -> None:  # noqa: D102
        self._require_ready()
        candidates = self._routing.candidates()
        background: dict[PlannedBatch, list[QueueEntry]] = {}
        for entry in entries:
            if (planned := entry.request.planned) is not None:
                background.setdefault(planned, []).append(entry)
                continue
            link = self._link_holding_query(entry.request) or self._routing.choose(entry.request, candidates)
            link.send_nowait(entry)
        for together in background.values():
            holding = [*filter(None, (self._link_holding_query(entry.request) for entry in together))]
            tokens = sum(entry.request.tokens for entry in together)
            link = holding[0] if holding else self._routing.choose_for_background(tokens, candidates)
            for entry in together:
                link.send_nowait(entry)

    def withdraw(self, entry: QueueEntry) -> None:  # noqa: D102
        if entry.link is not None:
            entry.link.withdraw(entry)

    def _link_holding_query(self, request: PoolingRequest) -> Link | None:
        """Return the link whose engine process holds the queries that a row needs; ``None`` if it needs none."""
        for param in request.params:
            if isinstance(param, QueryParams):
                for link in self._routing.ready:
                    if param.query.scope in link.scopes:
                        return link
                raise EngineDeadError("The engine process that held the query has died.")
        return None

    def _seconds_per_token(self) -> SecondsPerToken:
        """Return how long the engine processes take for a token of what this machine's API processes have admitted."""
        ready = self._routing.ready
        # Of a single replica they are as they came: this is called for each request that is admitted.
        if len(ready) == 1 and not ready[0].has_heartbeats:
            return ready[0].seconds_per_token
        now = time.perf_counter()
        if now > self._rates_from + RATES_KEPT_S:
            links = self._routing.computing()
            rates = np.array([link.seconds_per_token for link in links]).reshape(len(links), WORK_CLASSES)
            self._rates = rates_together(rates)
            self._others_tokens, self._rates_from = self._tokens_of_others(links, rates), now
        if not self._others_tokens:
            return self._rates
        # What others wait for is counted as if it had come from the same clients in the same proportions.
        admitted = float(self.waiting.total().sum())
        return self._rates * (1 + self._others_tokens / admitted) if admitted > 0 else self._rates

    def _tokens_of_others(self, links: Sequence[Link], rates: SecondsPerToken) -> float:
        """Return how many tokens wait at hosts besides those that this machine's API processes have admitted.

        A host with far more than the others delays nothing, as new rows go to those.
        """
        waiting = np.array([link.waiting_tokens if link.has_heartbeats else -1 for link in links], np.float64)
        are_hosts = (waiting >= 0) & ~np.isnan(rates[:, 0])
        waiting, rates, admitted = waiting[are_hosts], rates[are_hosts], self.waiting.total()
        if not waiting.any():
            return 0.0
        # Of rows like those that are admitted; only how fast the hosts are compared with each other counts.
        seconds_per_token = rates @ admitted if admitted.any() else rates.mean(axis=1)
        seconds = waiting * seconds_per_token
        counted = np.minimum(seconds, MAX_TIMES_MEDIAN * np.percentile(seconds, 50, method="lower"))
        return max(0.0, float((counted / seconds_per_token).sum() - admitted.sum()))

    def admit(self, work: EstimatedWork) -> AbstractContextManager[AdmittedRequest]:  # noqa: D102
        self._require_ready()
        return self._admission.admit(work)

    def refuse_late(self, work: EstimatedWork) -> None:  # noqa: D102
        self._require_ready()
        self._admission.refuse_late(work)

    def open_scope(self) -> AbstractContextManager[QueryScope]:  # noqa: D102
        self._require_ready()
        return closing(self._routing.soonest(1, self._routing.candidates()).open_scope())

    @property
    def dimensions(self) -> int:  # noqa: D102
        return self._hello.dimensions

    @property
    def embeds_width(self) -> int:  # noqa: D102
        return self._hello.embeds_width

    @property
    def max_batch_tokens(self) -> int:  # noqa: D102
        return self._hello.max_batch_tokens

    @property
    def cosine_with_float32(self) -> float | None:  # noqa: D102
        return self._hello.cosine_with_float32

    @property
    def probe_request(self) -> PoolingRequest | None:  # noqa: D102
        if self._hello.probe is None:
            return None
        ids, params = self._hello.probe
        kind = PoolingParams.by_name.get(params)
        return None if kind is None else PoolingRequest(RenderedPrompt(np.array(ids, np.int32)), (kind(),))

    @property
    def stall_reason(self) -> str:  # noqa: D102
        reasons = [link.stall_reason for link in self._routing.ready if link.takes_rows]
        return reasons[0] if reasons and all(reasons) else ""

    def is_overloaded(self, waited_s: float = 0.0) -> bool:  # noqa: D102
        return self._admission.is_full(waited_s)

    @property
    def _hello(self) -> Hello:
        self._require_ready()
        hello = self._routing.ready[0].hello
        assert hello is not None  # noqa: S101  (ready links have one)
        return hello

    async def wait_ready(self) -> None:  # noqa: D102
        while not self._dead and not self._routing.ready:
            await self._has_ready.wait()
        if self._dead:
            raise EngineDeadError("The engine has stopped.")

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:  # noqa: D102
        task_status.started()
        try:
            async with trio.open_nursery() as nursery:
                for link in self._links:
                    nursery.start_soon(link.run)
                await trio.sleep_forever()  # links that join are run by others
        finally:
            self._dead = True
            self._has_ready.set()

    @property
    def state(self) -> EngineState:  # noqa: D102  (ready as long as one replica is; stalled if all that are ready are)
        if self._dead:
            return "dead"
        if not self._takes_rows:
            return "loading"
        return "stalled" if self.stall_reason else "ready"

    @property
    def reported_load(self) -> dict[str, Any]:  # noqa: D102  (engine processes report the rest, but not that they are silent)
        stalled = {str(number): {"state": "stalled"} for number, link in enumerate(self._links) if link.stall_reason}
        return {"state": self.state, "admitted_tokens": self._admission.tokens, "replicas": stalled}

    @property
    def memory(self) -> ModelMemory:  # noqa: D102  (of the engine processes that are ready, those of other machines included)
        hellos = [link.hello for link in self._routing.ready if link.hello is not None]
        return ModelMemory(sum(each.resident_bytes for each in hellos), sum(each.device_bytes for each in hellos))

    def statistics(self) -> EngineStatistics:  # noqa: D102
        return EngineStatistics(
            state=self.state,
            queued_rows=sum(link.waiting_rows for link in self._routing.ready),
            queued_tokens=sum(link.own_tokens for link in self._routing.ready),
            admitted_tokens=self._admission.tokens,
            waiting_s=self._admission.waiting_s,
            tokens_per_s=sum(link.tokens_per_s for link in self._routing.ready),
        )

    def _require_ready(self) -> None:
        if self._dead:
            raise EngineDeadError("The engine has stopped.")
        if not self._takes_rows:
            raise EngineLoadingError("No engine process is ready.")

    @property
    def _takes_rows(self) -> bool:
        return any(link.takes_rows for link in self._routing.ready)

    def __repr__(self) -> str:
        return f"<ProcessEngine {self.state}, {self._routing.ready!r}>"
