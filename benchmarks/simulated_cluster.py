"""A cluster against a virtual clock: API processes, engines, and links that are as stale as between machines.

The queue, the forming of batches, the measured rates, admission, routing and what a link knows of its engine are the
server's own code. Simulated are the time that a device takes for a batch and an event loop for a request, the network,
and machines that are lost without a word. Left out are the frames that links send, rendering, and late interaction.
"""

import heapq
import itertools
import random
import time
from collections.abc import Callable, Sequence
from unittest import mock

import numpy as np
import trio
from attrs import define, field

from benchmarks.simulated_api import ApiProcess, SimulatedLink, SimulatedRequest
from benchmarks.simulated_engine import InFlight, News, SimulatedEngine
from benchmarks.simulated_scenario import Outcome, Scenario
from trio_pool_serve.engine.admission import EstimatedWork
from trio_pool_serve.engine.queue_entry import QueueEntry
from trio_pool_serve.engine.remote import routing
from trio_pool_serve.engine.remote.silence import TICKS
from trio_pool_serve.engine.waiting_work import SHAPE, WaitingWork
from trio_pool_serve.errors import EngineLoadingError, OverloadedError
from trio_pool_serve.types import Client, PoolingRequest, RenderedPrompt

REFUSAL_SHARE = 0.15
"""Of the event loop's time for a request, what a refusal takes: ``results/refusal_costs.md``."""


@define(eq=False)
class VirtualClock(trio.abc.Clock):
    """Stands still until it is set."""

    now: float = 0.0

    def start_clock(self) -> None:  # noqa: D102
        pass

    def current_time(self) -> float:  # noqa: D102
        return self.now

    def deadline_to_sleep_time(self, deadline: float) -> float:  # noqa: D102
        return max(0.0, deadline - self.now)


def simulate(scenario: Scenario) -> Outcome:
    """Run a scenario to the end of its last request; the same every time, but for the processor time it took."""
    clock = VirtualClock()

    async def run() -> Outcome:
        return Simulation(scenario, clock).run()

    with (
        mock.patch.object(time, "perf_counter", clock.current_time),
        mock.patch.object(routing, "COMPARED", scenario.compared),
    ):
        return trio.run(run, clock=clock)


@define(eq=False)
class Simulation:
    """The events of one scenario, in order of time."""

    scenario: Scenario
    clock: VirtualClock
    engines: list[SimulatedEngine] = field(init=False)
    apis: list[ApiProcess] = field(init=False)
    _answered: int = field(default=0, init=False)
    _in_window: int = field(default=0, init=False)
    _refused: int = field(default=0, init=False)
    _failed: int = field(default=0, init=False)
    _offered: int = field(default=0, init=False)
    _latencies: list[float] = field(init=False, factory=list)
    """Of the requests that arrived within the window."""
    _routing_s: float = field(default=0.0, init=False)
    _admission_s: float = field(default=0.0, init=False)
    _routed_rows: int = field(default=0, init=False)
    _lost_rows: int = field(default=0, init=False)
    _lost: list[SimulatedEngine] = field(init=False, factory=list)
    _random: random.Random = field(init=False)
    _events: list[tuple[float, int, Callable[..., None], tuple[object, ...]]] = field(init=False, factory=list)
    _numbers: "itertools.count[int]" = field(init=False, factory=itertools.count)
    _prompts: dict[int, RenderedPrompt] = field(init=False, factory=dict)
    _clients: list[Client] = field(init=False)

    def __attrs_post_init__(self) -> None:
        scenario = self.scenario
        self._random = random.Random(scenario.seed)
        self._clients = [Client(f"client {number}") for number in range(scenario.traffic.clients)]
        self.engines = [SimulatedEngine(scenario, position) for position in range(scenario.engines)]
        self.apis = []
        for begin in range(0, scenario.api_processes, scenario.processes_per_host):
            of_host = min(scenario.processes_per_host, scenario.api_processes - begin)
            counts = np.zeros((of_host, *SHAPE))
            for worker in range(of_host):
                waiting = WaitingWork(counts, worker)
                self.apis.append(ApiProcess.open(scenario, waiting, self._random.random(), self._note_lost))
        for engine in self.engines:
            for api in self.apis:
                engine.links.append(link := api.link_to(engine, self._note_unsent))
                link.connect(0.0)
            self._at(self._random.uniform(0, scenario.heartbeat_s), self._beat, engine)

    def run(self) -> Outcome:
        """Handle all events."""
        scenario = self.scenario
        self._at(self._pause_s(), self._arrive)
        if scenario.lost_engines:
            self._at(scenario.lost_at_s, self._lose_machines)
            self._at(scenario.back_at_s, self._bring_back)
        while self._events:
            at, _, handle, arguments = heapq.heappop(self._events)
            self.clock.now = at
            handle(*arguments)
        return self._outcome()

    def _outcome(self) -> Outcome:
        busy = [engine.busy_share for engine in self.engines]
        p50, p99 = np.percentile(self._latencies, (50, 99)) if self._latencies else (0.0, 0.0)
        return Outcome(
            offered=self._offered,
            answered=self._answered,
            refused=self._refused,
            failed=self._failed,
            lost_rows=self._lost_rows,
            goodput_per_s=self._in_window / self.scenario.window_s,
            p50_s=float(p50),
            p99_s=float(p99),
            busy=sum(busy) / len(busy),
            imbalance=max(busy) * len(busy) / max(sum(busy), 1e-9),
            routing_us=1e6 * self._routing_s / max(1, self._routed_rows),
            admission_us=1e6 * self._admission_s / max(1, self._offered),
            tokens=tuple([engine.computed_tokens for engine in self.engines]),
        )

    def _at(self, when: float, handle: Callable[..., None], *arguments: object) -> None:
        heapq.heappush(self._events, (when, next(self._numbers), handle, arguments))

    def _after(self, seconds: float, handle: Callable[..., None], *arguments: object) -> None:
        self._at(self.clock.now + seconds, handle, *arguments)

    def _pause_s(self) -> float:
        return self._random.expovariate(self.scenario.requests_per_s)

    @property
    def _is_over(self) -> bool:
        ended = self._answered + self._refused + self._failed
        return self.clock.now >= self.scenario.seconds and ended == self._offered

    def _arrive(self) -> None:
        """Give a request to an API process, whichever accepts its connection."""
        api = self._random.choice(self.apis)
        request = self._make_request()
        self._offered += 1
        api.unread.append(request)
        if not api.is_busy:
            self._read(api)
        pause_s = self._pause_s()
        if self.clock.now + pause_s < self.scenario.seconds:
            self._after(pause_s, self._arrive)

    def _make_request(self) -> SimulatedRequest:
        traffic, draw = self.scenario.traffic, self._random
        rows = traffic.rows_of_several if draw.random() < traffic.several_share else 1
        client, group = draw.choice(self._clients), self._offered + 1
        prompts = [self._prompt(draw.choice(traffic.lengths)) for _ in range(rows)]
        requests = [PoolingRequest(prompt, group=group, client=client.number, is_alone=rows == 1) for prompt in prompts]
        return SimulatedRequest(client, self.clock.now, requests, self._end)

    def _prompt(self, tokens: int) -> RenderedPrompt:
        prompt = self._prompts.get(tokens)
        if prompt is None:
            prompt = self._prompts[tokens] = RenderedPrompt(np.zeros(tokens, np.int32))
        return prompt

    def _read(self, api: ApiProcess) -> None:
        """Have an event loop begin with its next request."""
        request = api.unread.popleft()
        api.is_busy = True
        work = EstimatedWork(tokens=request.tokens, rows=len(request.rows), client=request.client)
        cost_s = self.scenario.seconds_of(len(request.rows))
        began = time.process_time()
        try:
            request.begin(api.engine.admit(work))
        except OverloadedError:
            self._refused += 1
        except EngineLoadingError:
            self._failed += 1
        self._admission_s += time.process_time() - began
        self._after(cost_s if request.admitted else REFUSAL_SHARE * cost_s, self._submit, api, request)

    def _submit(self, api: ApiProcess, request: SimulatedRequest) -> None:
        if request.admitted:
            began = time.process_time()
            try:
                api.engine.submit_nowait(*request.rows)
            except EngineLoadingError as error:
                request.end(error)
            self._routing_s += time.process_time() - began
            self._routed_rows += len(request.rows)
        api.is_busy = False
        if api.unread:
            self._read(api)

    def _end(self, request: SimulatedRequest, error: Exception | None) -> None:
        if error is not None:
            self._failed += 1
            return
        now, scenario = self.clock.now, self.scenario
        self._answered += 1
        if scenario.warm_s <= now < scenario.seconds:
            self._in_window += 1
        if request.arrived >= scenario.warm_s:
            self._latencies.append(now - request.arrived)

    def _note_unsent(self, link: SimulatedLink) -> None:
        self._after(self.scenario.network_s, self._receive, link)

    def _receive(self, link: SimulatedLink) -> None:
        """Give an engine what its link has to send; nobody, if it is lost and the link does not know that yet."""
        entries = link.take_unsent()
        if entries and link.generation == link.remote.generation:
            link.remote.put(entries, self.clock.now)
            self._launch(link.remote)

    def _launch(self, engine: SimulatedEngine) -> None:
        for batch in engine.launch(self.clock.now):
            self._at(batch.done, self._finish, engine, engine.generation, batch)

    def _finish(self, engine: SimulatedEngine, generation: int, batch: InFlight) -> None:
        if engine.generation != generation:
            return
        by_link, news = engine.finish(batch, self.clock.now), engine.news
        for link, entries in by_link.items():
            self._after(self.scenario.network_s, self._answer, link, generation, entries, news)
        self._launch(engine)

    def _answer(self, link: SimulatedLink, generation: int, entries: Sequence[QueueEntry], news: News) -> None:
        link.answer(generation, entries, news, self.clock.now)

    def _beat(self, engine: SimulatedEngine) -> None:
        """Have an engine tell all its links how much waits, as it does where there was no answer for so long."""
        if not engine.is_lost:
            generation, news, now = engine.generation, engine.news, self.clock.now
            for link in engine.links:
                link.hear(generation, news, now)
        if not self._is_over:
            self._after(self.scenario.heartbeat_s, self._beat, engine)

    def _lose_machines(self) -> None:
        scenario = self.scenario
        self._lost = self._random.sample(self.engines, scenario.lost_engines)
        for engine in self._lost:
            engine.lose(self.clock.now)
            for link in engine.links:
                silent_s = scenario.link_timeout_s * (1 + self._random.random() / TICKS)
                self._at(max(self.clock.now, link.heard_at + silent_s), link.lose)

    def _note_lost(self, rows: int) -> None:
        self._lost_rows += rows

    def _bring_back(self) -> None:
        for engine in self._lost:
            engine.begin_again(self.clock.now)
            for link in engine.links:
                self._after(self._random.uniform(0, self.scenario.longest_pause_s), self._connect, link)

    def _connect(self, link: SimulatedLink) -> None:
        link.connect(self.clock.now)
