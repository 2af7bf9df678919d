"""The engine whose models compute in engine processes."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, closing
from pathlib import Path
from typing import Any

import numpy as np
import trio
from attrs import define, field

from trio_pool_serve.config import SchedulingConfig
from trio_pool_serve.engine.admission import Admission, AdmittedRequest, EstimatedWork
from trio_pool_serve.engine.compute_rates import SecondsPerToken, rates_together
from trio_pool_serve.engine.engine import Engine, EngineState, EngineStatistics
from trio_pool_serve.engine.queue import FAIRNESS, MAX_KEPT_TOGETHER, MAX_TOKENS_BEFORE_LONG, is_long
from trio_pool_serve.engine.queue_entry import QueueEntry
from trio_pool_serve.engine.remote.link import Link
from trio_pool_serve.engine.remote.wire import Hello
from trio_pool_serve.engine.waiting_work import WaitingWork
from trio_pool_serve.errors import EngineDeadError, EngineLoadingError
from trio_pool_serve.telemetry.metrics import EngineMetrics
from trio_pool_serve.types import PlannedBatch, PoolingParams, PoolingRequest, QueryParams, QueryScope, RenderedPrompt


@define(eq=False)
class ProcessEngine(Engine):
    """Sends each row to the replica with the fewest waiting tokens, but keeps long rows together.

    A forward pass cannot be interrupted: if every replica computed a long row, a short one would wait for one of them.
    So long rows fill one replica after the other, from the last, and short ones find the first free. That holds while
    short rows are at least an eighth of all tokens: with fewer, replicas kept free for them would be idle.

    ``sockets`` are the paths where the replicas of one model listen, now or later. They are restarted elsewhere: the
    rows of one that dies fail, and while there is none the engine's state is loading. ``waiting`` is shared with the
    other API processes, so that all admit by what waits in all of them.
    """

    sockets: Sequence[Path]
    metrics: EngineMetrics
    config: SchedulingConfig = field(factory=SchedulingConfig)
    waiting: WaitingWork = field(factory=WaitingWork)
    _links: list[Link] = field(init=False)
    _admission: Admission = field(init=False)
    _dead: bool = field(default=False, init=False)
    _kept_together: int = field(default=0, init=False)
    """Tokens of long rows that are still to be kept together."""

    def __attrs_post_init__(self) -> None:
        self._links = [Link(path, self.config.stall_timeout_s) for path in self.sockets]
        self._admission = Admission(
            self.config.max_queue_s,
            self._seconds_per_token,
            self.waiting,
            is_fair=self.config.fairness == "client",
        )
        # The engine processes count everything else.
        self.metrics.add_gauges(lambda: {"engine": {"admitted_tokens": self._admission.tokens}})

    def submit_nowait(self, *entries: QueueEntry) -> None:  # noqa: D102
        self._require_ready()
        usable = self._usable_links
        of_planned: dict[PlannedBatch, Link] = {}
        for entry in entries:
            planned = entry.request.planned
            link = of_planned.get(planned) if planned is not None else None
            link = link or self._link_for(entry.request, usable)
            if planned is not None:
                of_planned[planned] = link
            link.send_nowait(entry)

    def withdraw(self, entry: QueueEntry) -> None:  # noqa: D102
        for link in self._links:
            link.withdraw(entry)

    def _link_for(self, request: PoolingRequest, usable: Sequence[Link]) -> Link:
        for param in request.params:
            if isinstance(param, QueryParams):
                return self._link_holding(param.query.scope)
        if len(usable) == 1:
            return usable[0]
        if is_long(request):
            return self._link_for_long(request.tokens, usable)
        self._kept_together = min(MAX_KEPT_TOGETHER, self._kept_together + FAIRNESS * request.tokens)
        return _least_busy(usable)

    def _link_for_long(self, tokens: int, usable: Sequence[Link]) -> Link:
        together, self._kept_together = self._kept_together, max(0, self._kept_together - tokens)
        if together >= tokens:
            for link in reversed(usable):
                if link.waiting_tokens <= MAX_TOKENS_BEFORE_LONG:
                    return link
        return _least_busy(usable)

    def _link_holding(self, scope: QueryScope) -> Link:
        for link in self._links:
            if scope in link.scopes:
                return link
        raise EngineDeadError("The engine process that held the query has died.")

    def _tokens_per_s(self) -> float:
        return sum(link.tokens_per_s for link in self._links)

    def _seconds_per_token(self) -> SecondsPerToken:
        # Of a single replica they are as they came: this is called for each request that is admitted.
        if len(self._links) == 1:
            return self._links[0].seconds_per_token
        return rates_together([link.seconds_per_token for link in self._ready_links])

    @property
    def _ready_links(self) -> list[Link]:
        return [link for link in self._links if link.hello is not None]

    @property
    def _usable_links(self) -> list[Link]:
        """Those that are not stalled; if all are, all of them."""
        ready = self._ready_links
        return [link for link in ready if not link.stall_reason] or ready

    def admit(self, work: EstimatedWork) -> AbstractContextManager[AdmittedRequest]:  # noqa: D102
        self._require_ready()
        return self._admission.admit(work)

    def refuse_late(self, work: EstimatedWork) -> None:  # noqa: D102
        self._require_ready()
        self._admission.refuse_late(work)

    def open_scope(self) -> AbstractContextManager[QueryScope]:  # noqa: D102
        self._require_ready()
        return closing(_least_busy(self._usable_links).open_scope())

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
        reasons = [link.stall_reason for link in self._ready_links]
        return reasons[0] if reasons and all(reasons) else ""

    def is_overloaded(self, waited_s: float = 0.0) -> bool:  # noqa: D102
        return self._admission.is_full(waited_s)

    @property
    def _hello(self) -> Hello:
        self._require_ready()
        hello = _least_busy(self._usable_links).hello
        assert hello is not None  # noqa: S101  (ready links have one)
        return hello

    async def wait_ready(self) -> None:  # noqa: D102
        async with trio.open_nursery() as nursery:

            async def wait(link: Link) -> None:
                await link.wait_ready()
                nursery.cancel_scope.cancel(reason="one is enough")

            for link in self._links:
                nursery.start_soon(wait, link)
        if self._dead:
            raise EngineDeadError("The engine has stopped.")

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:  # noqa: D102
        task_status.started()
        try:
            async with trio.open_nursery() as nursery:
                for link in self._links:
                    nursery.start_soon(link.run)
        finally:
            self._dead = True

    @property
    def state(self) -> EngineState:  # noqa: D102  (ready as long as one replica is; stalled if all that are ready are)
        if self._dead:
            return "dead"
        if not self._ready_links:
            return "loading"
        return "stalled" if self.stall_reason else "ready"

    @property
    def reported_load(self) -> dict[str, Any]:  # noqa: D102  (engine processes report the rest, but not that they are silent)
        stalled = {str(number): {"state": "stalled"} for number, link in enumerate(self._links) if link.stall_reason}
        return {"state": self.state, "admitted_tokens": self._admission.tokens, "replicas": stalled}

    def statistics(self) -> EngineStatistics:  # noqa: D102
        return EngineStatistics(
            state=self.state,
            queued_rows=sum(link.waiting_rows for link in self._links),
            queued_tokens=sum(link.own_tokens for link in self._links),
            in_flight_batches=0,
            oldest_in_flight_s=0.0,
            admitted_tokens=self._admission.tokens,
            waiting_s=self._admission.waiting_s,
            tokens_per_s=self._tokens_per_s(),
            batches=0,
            failed_batches=0,
            held_bytes=0,
            batch_token_budget=0,
        )

    def _require_ready(self) -> None:
        state = self.state
        if state == "loading":
            raise EngineLoadingError("No engine process is ready; one is being started.")
        if state == "dead":
            raise EngineDeadError("The engine has stopped.")

    def __repr__(self) -> str:
        return f"<ProcessEngine {self.state}, {self._links!r}>"


def _least_busy(links: Sequence[Link]) -> Link:
    return min(links, key=lambda link: link.waiting_tokens)
