"""An engine of a simulated cluster: the real queue, budgets and rates, over a device that only takes time."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from attrs import define, field, frozen

from benchmarks.simulated_scenario import Scenario
from trio_pool_serve.config import SchedulingConfig
from trio_pool_serve.engine.batching import BulkBudget
from trio_pool_serve.engine.compute_rates import ComputeRates, DrainClock, SecondsPerToken, work_class
from trio_pool_serve.engine.local import MAX_AGE
from trio_pool_serve.engine.queue import RequestQueue
from trio_pool_serve.engine.queue_entry import QueueEntry

if TYPE_CHECKING:
    from benchmarks.simulated_api import SimulatedLink


@frozen(eq=False)
class News:
    """What an engine says of itself with each answer."""

    waiting_tokens: int
    tokens_per_s: float
    seconds_per_token: SecondsPerToken


@frozen(eq=False)
class InFlight:
    """A batch that is being computed."""

    entries: Sequence[QueueEntry]
    tokens: int
    launched: float
    begins: float
    done: float


@define(eq=False)
class SimulatedEngine:
    """Computes batches as ``LocalEngine`` does, one after the other; ``generation`` counts its processes."""

    scenario: Scenario
    position: int
    links: "list[SimulatedLink]" = field(init=False, factory=list)
    generation: int = field(default=0, init=False)
    is_lost: bool = field(default=False, init=False)
    busy_s: float = field(default=0.0, init=False)
    """Within the time that counts, as the next."""
    lost_s: float = field(default=0.0, init=False)
    computed_tokens: int = field(default=0, init=False)
    _lost_at: float = field(default=0.0, init=False)
    _queue: RequestQueue = field(init=False)
    _rates: ComputeRates = field(init=False)
    _drain_clock: DrainClock = field(init=False)
    _bulk: BulkBudget = field(init=False)
    _in_flight: list[InFlight] = field(init=False)
    _free_at: float = field(init=False)
    _last_done: float = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._begin(0.0)

    def _begin(self, now: float) -> None:
        scenario, config = self.scenario, SchedulingConfig()
        self._queue = RequestQueue(scenario.device.pads, max_age_s=MAX_AGE * scenario.max_queue_s)
        self._rates, self._drain_clock, self._bulk = ComputeRates(), DrainClock(), BulkBudget(config.bulk_batch_s)
        self._in_flight = []
        self._free_at = self._last_done = now

    @property
    def news(self) -> News:
        """What it says of itself now."""
        tokens = self._queue.tokens + sum([each.tokens for each in self._in_flight])
        return News(tokens, self._rates.tokens_per_s, self._rates.seconds_per_token)

    @property
    def busy_share(self) -> float:
        """Of the time that counts and in which it was there."""
        return self.busy_s / (self.scenario.window_s - self.lost_s)

    def put(self, entries: Sequence[QueueEntry], now: float) -> None:
        """Queue rows."""
        for entry in entries:
            entry.queued_at = now
        self._queue.put_nowait(*entries)

    def withdraw(self, entry: QueueEntry) -> None:
        """Take a row out of the queue, if it is there."""
        self._queue.withdraw(entry)

    def launch(self, now: float) -> Iterator[InFlight]:
        """Launch batches while there is room."""
        device = self.scenario.device
        while len(self._in_flight) < device.in_flight and len(self._queue):
            entries = self._queue.take_batch(device.max_batch_tokens, self._bulk.tokens)
            begins = max(now, self._free_at)
            self._free_at = begins + self._seconds_of(entries)
            batch = InFlight(entries, sum([entry.tokens for entry in entries]), now, begins, self._free_at)
            self._in_flight.append(batch)
            yield batch
        if not len(self._queue) and len(self._in_flight) < device.in_flight:
            self._drain_clock.note_idle()

    def _seconds_of(self, entries: Sequence[QueueEntry]) -> float:
        device, lengths = self.scenario.device, [entry.tokens for entry in entries]
        tokens = max(lengths) * len(lengths) if device.pads else sum(lengths)
        return self.scenario.slowness_of(self.position) * (device.fixed_s + tokens * device.seconds_per_token)

    def _counted(self, begin: float, end: float) -> float:
        return max(0.0, min(end, self.scenario.seconds) - max(begin, self.scenario.warm_s))

    def finish(self, batch: InFlight, now: float) -> "dict[SimulatedLink, list[QueueEntry]]":
        """Note that a batch is done; return its rows by the links that have sent them."""
        left_waiting = len(self._queue) > 0
        seconds = self._drain_clock.note_done(batch.launched, now, left_waiting=left_waiting)
        measured = work_class(batch.tokens // len(batch.entries))
        self._rates.observe(measured, batch.tokens, seconds, left_waiting=left_waiting)
        self._bulk.observe(batch.tokens, now - max(batch.launched, self._last_done))
        self._last_done = now
        self._in_flight.remove(batch)
        self.busy_s += self._counted(batch.begins, batch.done)
        self.computed_tokens += batch.tokens
        by_link: dict[SimulatedLink, list[QueueEntry]] = {}
        for entry in batch.entries:
            by_link.setdefault(entry.link, []).append(entry)
        return by_link

    def lose(self, now: float) -> None:
        """Be gone, with all rows."""
        self.is_lost, self._lost_at = True, now
        self.generation += 1
        for entry in self._queue:
            entry.queue_class = None  # if it is sent again, another queue will have it
        self._begin(now)

    def begin_again(self, now: float) -> None:
        """Be there again, as a new process."""
        self.is_lost = False
        self.lost_s += self._counted(self._lost_at, now)
        self._begin(now)
