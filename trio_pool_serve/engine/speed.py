"""How fast devices are, measured while serving: seconds per token of a queue, and seconds per pass of a device."""

import math
from collections import deque
from collections.abc import Sequence
from functools import lru_cache
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from attrs import define, field

from trio_pool_serve.threads.moving_average import MovingAverage

LENGTHS = 16
"""Octaves of row length measured separately; the last one contains all rows of 2¹⁵ tokens and more."""

WORK_CLASSES = 2 * LENGTHS
"""Rows without images by length, then rows with images, whose tokens include the cost of the image tower."""

BATCHES = 16
"""The rate of a class is the mean over this many batches."""

MAX_OUTLIER = 4.0
"""A batch counts with at most this many times the median rate: the first batch of a shape is compiled."""

MIN_BATCHES = 3
"""Minimum batches of a class before its rate counts."""

PASS_WEIGHT = 0.2
"""Weight of the newest pass in a device's averages."""

SHORT_PASS_S = 0.02
"""Target duration of a short pass: of long work while small requests arrive, which wait until it is computed."""

SecondsPerToken: TypeAlias = npt.NDArray[np.float64]
"""Shape (``WORK_CLASSES``,); all NaN before the first batch."""


@lru_cache(4096)
def work_class(tokens: int, *, has_images: bool = False) -> int:
    """Return the work class of rows of ``tokens`` tokens."""
    octave = min(max(tokens, 1).bit_length() - 1, LENGTHS - 1)
    return octave + LENGTHS if has_images else octave


UNKNOWN: SecondsPerToken = np.full(WORK_CLASSES, np.nan)


@define(eq=False)
class ComputeRates:
    """The rates of one engine: ``seconds_per_token`` by work class; an unknown class has the rate of the nearest known.

    A rate is the mean over the latest batches, not the median: of two threads, one may finish just after the other
    again and again, and then neither the short nor the long times between their batches show how fast they are
    together.

    Only batches that left rows waiting show how fast a queue drains: other batches are smaller than they could be.
    Until there is one, nothing has waited for long.
    """

    seconds_per_token: SecondsPerToken = field(init=False, factory=UNKNOWN.copy)
    shared: SecondsPerToken = field(init=False, factory=UNKNOWN.copy)
    """The rates of this process's rows, reduced by what the devices compute for other processes."""
    _others_share: float = field(init=False, default=0.0)
    _assumed_s: float = field(init=False, default=math.nan)
    latest: float = field(default=0.0, init=False)
    """The rate of the class measured last, even if of few batches; 0 before the first."""
    _latest: dict[int, deque[tuple[float, int]]] = field(init=False, factory=dict)
    """Seconds and tokens of the latest batches, by class."""
    _known: SecondsPerToken = field(init=False, factory=lambda: np.zeros(WORK_CLASSES))
    _nearest: npt.NDArray[np.intp] | None = field(init=False, default=None)
    _last_done: float = field(default=0.0, init=False)
    left_waiting: bool = field(default=False, init=False)
    """Whether rows were waiting when the latest batch was done, and still wait."""

    def observe(self, measured_class: int, tokens: int, seconds: float, *, left_waiting: bool) -> None:
        """Record a batch of ``tokens`` tokens that occupied the device for ``seconds``."""
        if not left_waiting:
            return
        latest = self._latest.setdefault(measured_class, deque(maxlen=BATCHES))
        latest.append((max(seconds, 1e-6), tokens))
        limit = MAX_OUTLIER * sorted(each_s / each for each_s, each in latest)[len(latest) // 2]
        self.latest = sum(min(each_s, limit * each) for each_s, each in latest) / sum(each for _, each in latest)
        if len(latest) < MIN_BATCHES:
            return
        self._known[measured_class] = self.latest
        if len(latest) == MIN_BATCHES:
            self._nearest = _nearest_known(np.flatnonzero(self._known).tolist())
        # Once for each batch here, not for each request that is admitted.
        self.seconds_per_token = self._known[self._nearest].reshape(-1)
        self._share()

    def seconds_of(self, measured_class: int, tokens: int) -> float:
        """Return how long rows of a class will take together, in seconds; 0 if that is unknown."""
        seconds = tokens * float(self.seconds_per_token[measured_class])
        return seconds if math.isfinite(seconds) else 0.0

    def note_others(self, share: float, assumed_s: float) -> None:
        """Note the tokens that the devices compute for other processes, for each token of this one.

        ``assumed_s`` are the seconds per token that count while none are measured here; NaN if they are unknown.
        """
        self._others_share, self._assumed_s = share, assumed_s
        self._share()

    def _share(self) -> None:
        known = self.seconds_per_token
        self.shared = (np.full_like(known, self._assumed_s) if math.isnan(known[0]) else known) * (
            1 + self._others_share
        )

    def drain_s(self, launched: float, done: float, *, left_waiting: bool) -> float:
        """Return how long a batch kept waiting rows waiting, without the time in which the previous batch did.

        If the previous batch left rows waiting, the time until more of them were launched is part of the rate. Times
        are by ``time.perf_counter``.
        """
        since = self._last_done if self.left_waiting else max(launched, self._last_done)
        self._last_done, self.left_waiting = done, left_waiting
        return done - since

    def note_idle(self) -> None:
        """Note that no rows wait: the time until the next launch does not count for that batch."""
        self.left_waiting = False


def _nearest_known(known: Sequence[int]) -> npt.NDArray[np.intp]:
    """Return for each class the known class nearest in length, of the same kind if there is one."""
    return np.array(
        [
            min(known, key=lambda each: (each // LENGTHS != kind, abs(each % LENGTHS - octave)))
            for kind, octave in np.ndindex(WORK_CLASSES // LENGTHS, LENGTHS)
        ]
    )


@define(eq=False)
class PassCost:
    """How long the passes of one device take: a constant part, and a part for each token.

    The line is fitted to the averages of each octave of tokens, by least squares of relative errors: so a size that is
    no longer computed still counts, and a pass of many tokens does not count for more than one of few. While all passes
    are of one octave, no part is known to be constant.
    """

    constant_s: float = field(init=False, default=0.0)
    """Seconds of any pass, however few its tokens; 0 if nothing has been measured."""
    token_s: float = field(init=False, default=0.0)
    """Seconds of each of its tokens; 0 if nothing has been measured."""
    _rate: MovingAverage = field(init=False, factory=lambda: MovingAverage(PASS_WEIGHT))
    _octaves: dict[int, tuple[MovingAverage, MovingAverage]] = field(init=False, factory=dict)
    """Tokens and seconds of passes, by octave of tokens."""

    def observe(self, tokens: int, seconds: float) -> None:
        """Record a pass."""
        seconds = max(seconds, 1e-6)  # an engine process may send any number
        self._rate.observe(tokens / seconds)
        averages = self._octaves.setdefault(
            tokens.bit_length(), (MovingAverage(PASS_WEIGHT), MovingAverage(PASS_WEIGHT))
        )
        for average, value in zip(averages, (tokens, seconds), strict=True):
            average.observe(value)
        # The normal equations of 1 = constant_s · (1 / seconds) + token_s · (tokens / seconds).
        points = [(1 / each_s.value, each.value / each_s.value) for each, each_s in self._octaves.values()]
        u, v = map(sum, zip(*points, strict=True))
        uu, uv, vv = sum([x * x for x, _ in points]), sum([x * y for x, y in points]), sum([y * y for _, y in points])
        determinant = uu * vv - uv * uv
        if len(points) == 1 or determinant <= 0 or u * vv < v * uv:
            self.constant_s, self.token_s = 0.0, v / vv
        elif v * uu < u * uv:  # more tokens took less time
            self.constant_s, self.token_s = u / uu, 0.0
        else:
            self.constant_s, self.token_s = (u * vv - v * uv) / determinant, (v * uu - u * uv) / determinant

    @property
    def tokens_per_s(self) -> float:
        """Tokens of a pass per second, as a moving average; 0 before the first."""
        return self._rate.value

    def seconds(self, tokens: int) -> float:
        """Return how long a pass of ``tokens`` will take; 0 if nothing has been measured.

        While no pass of so few tokens has been measured, how much of the smallest is constant is unknown: all of it.
        """
        least = min([measured.value for measured, _ in self._octaves.values()], default=0.0)
        return self.constant_s + max(tokens, least) * self.token_s

    @property
    def short_tokens(self) -> int:
        """Tokens of a pass that takes ``SHORT_PASS_S``, or longer if more than a third of it would be constant.

        At most twice the tokens that were measured: the line of small passes says little about much larger ones. A
        longer row is a pass of its own.
        """
        most = max([1, *[int(2 * tokens.value) for tokens, _ in self._octaves.values()]])
        if not self.token_s:
            return most
        return max(1, min(most, int(max(SHORT_PASS_S - self.constant_s, 2 * self.constant_s) / self.token_s)))
