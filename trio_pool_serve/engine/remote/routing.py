"""Which engine gets a row: the one that will have computed it first, but long rows keep together."""

import math
import random
from bisect import insort
from collections.abc import Iterable, Sequence

from attrs import define, field

from trio_pool_serve.engine.compute_rates import work_class
from trio_pool_serve.engine.queue import FAIRNESS, MAX_KEPT_TOGETHER, MAX_TOKENS_BEFORE_LONG, is_long
from trio_pool_serve.engine.remote.link import Link
from trio_pool_serve.types import PoolingRequest

COMPARED = 8
"""Engines that are compared for the rows of one chunk, picked at random if there are more: what API processes know of
an engine is older than what they have sent to it, and all of them would pick the same one. Of 100 simulated engines,
with 8 the median was a quarter to a third longer than with all, at under a third of the cost, and p99 shorter while
all were equally fast (one seed); with 2, both were often slow: ``docs/scaling.md``."""

OTHER_ZONE_S = 0.05
"""A row goes to another zone if it is computed sooner there by so many seconds: between zones, bytes cost money and
about a millisecond."""

ASSUMED_SECONDS_PER_TOKEN = 1e-4
"""While no engine's rate is known."""


@define(eq=False)
class Routing:
    """Chooses between the engines of one model that are ready.

    A forward pass cannot be interrupted: if every engine computed a long row, a short one would wait for one of them.
    So long rows fill one engine after the other, from the last, and short ones find the first free. That holds while
    short rows are at least an eighth of all tokens: with fewer, engines kept free for them would be idle. Of many
    engines, the last of those that are compared is filled: were it the last of all, all API processes would fill it at
    once, as none of them knows yet what the others have sent.

    ``zone`` is this process's: others are for what would wait here.
    """

    zone: str = ""
    ready: list[Link] = field(init=False, factory=list)
    _near: list[Link] = field(init=False, factory=list)
    _far: list[Link] = field(init=False, factory=list)
    _kept_together: int = field(default=0, init=False)
    """Tokens of long rows that are still to be kept together."""
    _random: random.Random = field(factory=random.Random)

    def add(self, engine: Link) -> None:
        """Add an engine that has become ready."""
        of_zone = self._near if not self.zone or engine.zone == self.zone else self._far
        for engines in (self.ready, of_zone):
            insort(engines, engine, key=lambda each: each.position)

    def remove(self, engine: Link) -> None:
        """Remove an engine, if it is there."""
        for engines in (self.ready, self._near, self._far):  # by now its zone may not be known any more
            if engine in engines:
                engines.remove(engine)

    def candidates(self) -> Sequence[Link]:
        """Return the engines to choose from for some rows, in order: those that are stalled only if all are."""
        compared = [*self._some(self._far), *self._some(self._near)] if self._far else self._some(self._near)
        return compared or self.computing()

    def computing(self) -> list[Link]:
        """Return the engines by which new rows may be computed: those that are stalled only if all are."""
        usable = [engine for engine in self.ready if engine.is_usable]
        return usable or [engine for engine in self.ready if engine.takes_rows]

    def _some(self, engines: Sequence[Link]) -> list[Link]:
        if len(engines) <= COMPARED:
            return [engine for engine in engines if engine.is_usable]
        usable = [engine for engine in self._picked(engines) if engine.is_usable]
        if len(usable) >= COMPARED // 2:
            return usable
        # So many get no rows that looking at all of them is worth it.
        usable = [engine for engine in engines if engine.is_usable]
        return usable if len(usable) <= COMPARED else self._picked(usable)

    def _picked(self, engines: Sequence[Link]) -> list[Link]:
        return [engines[index] for index in sorted(self._random.sample(range(len(engines)), COMPARED))]

    def choose(self, request: PoolingRequest, candidates: Sequence[Link]) -> Link:
        """Return the engine for a row. ``candidates`` are those for it and others, not empty."""
        if len(candidates) == 1:
            return candidates[0]
        if is_long(request):
            return self._choose_for_long(request, candidates)
        self._kept_together = min(MAX_KEPT_TOGETHER, self._kept_together + FAIRNESS * request.tokens)
        return self.soonest(request.tokens, candidates, has_images=request.prompt.images is not None)

    def _choose_for_long(self, request: PoolingRequest, candidates: Sequence[Link]) -> Link:
        tokens = request.tokens
        together, self._kept_together = self._kept_together, max(0, self._kept_together - tokens)
        if together >= tokens:
            for engine in reversed(candidates):
                if engine.waiting_tokens <= MAX_TOKENS_BEFORE_LONG and engine.is_usable:
                    return engine
        return self.soonest(tokens, candidates, has_images=request.prompt.images is not None)

    def choose_for_background(self, tokens: int, candidates: Sequence[Link]) -> Link:
        """Return the engine for a planned batch of so many tokens: the one with the least background work."""
        rates = _rates_of(candidates, work_class(tokens))
        seconds = [
            (engine.waiting_tokens + engine.background_tokens + tokens) * rate
            for engine, rate in zip(candidates, rates, strict=True)
        ]
        return candidates[seconds.index(min(seconds))]

    def soonest(self, tokens: int, candidates: Sequence[Link], *, has_images: bool = False) -> Link:
        """Return the engine that will first have computed a row of so many tokens."""
        rates = _rates_of(candidates, work_class(tokens, has_images=has_images))
        best, best_s = candidates[0], math.inf
        for engine, rate in zip(candidates, rates, strict=True):
            seconds = (engine.waiting_tokens + tokens) * rate
            if self._far and self.zone and engine.zone != self.zone:
                seconds += OTHER_ZONE_S
            if seconds < best_s:
                best, best_s = engine, seconds
        return best


def _rates_of(engines: Iterable[Link], row_class: int) -> list[float]:
    """Return the seconds per token of each; of those that are unknown, the mean of the others."""
    rates = [rate_of(engine, row_class) for engine in engines]
    known = [rate for rate in rates if rate is not None]
    if len(known) == len(rates):
        return known
    assumed = sum(known) / len(known) if known else ASSUMED_SECONDS_PER_TOKEN
    return [assumed if rate is None else rate for rate in rates]


def rate_of(engine: Link, row_class: int) -> float | None:
    """Return how long an engine takes for a token (seconds), ``None`` if it has computed nothing for long enough.

    What it has computed lately can be faster than its rate, which is then an old one: a slow engine gets few rows, and
    so is seldom measured.
    """
    rate = float(engine.seconds_per_token[row_class])
    if not rate > 0:  # or it is NaN
        return None
    return min(rate, 1 / engine.tokens_per_s) if engine.tokens_per_s > 0 else rate
