"""The number of replicas that a model needs, from the duration of its admitted work and from how busy they are."""

import math
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from attrs import Factory, define, field

from trio_pool_serve.engine.places.supervisor import Place
from trio_pool_serve.processes.socket_folder import shared_array
from trio_pool_serve.telemetry.metrics import BUSY
from trio_pool_serve.telemetry.snapshots import Snapshot

SCALING_S = 0.5
"""Interval at which the queue is checked."""

UP_AFTER_S = 2.0
"""How long the queue must be too long before replicas are added."""

MAX_GROWTH = 2
"""At most this factor for the number of ready replicas, before the new ones take their part of the queue."""

UP_QUEUE_SHARE = 0.2
"""Share of ``max_queue_s`` above which replicas are added: 1 s of 5 s, before requests are refused."""

MAX_QUEUES_IDLE = 12
"""An unneeded replica is drained after this many times ``max_queue_s`` (a minute for 5 s): starting one takes long."""

NEXT_TO_NO_QUEUE = 0.1
"""A replica is drained only if the queue would stay below this share of that length without it."""

MAX_BUSY = 0.7
"""Maximum share of the time that the remaining replicas would compute: above it, queues of a few batches are usual."""

FRESH_S = 1.5
"""How long an estimate counts: three times ``SCALING_S``, and less than ``UP_AFTER_S``, so that the last estimate of a
process that has died adds no replicas by itself."""

BUSY_OVER_S = 10.0
"""Period over which busy seconds are counted: long compared to a batch, which counts when it is done."""


@define(eq=False)
class QueueScaling:
    """The number of replicas, ``wanted``, from ``least`` to ``most``.

    Replicas are added if the queue has been longer than ``UP_QUEUE_SHARE`` of ``max_queue_s`` for ``UP_AFTER_S``: as
    many as would make it that long, at most as many as are ready. None is added while others are starting; failed ones
    do not count as starting.

    One is removed if, for ``MAX_QUEUES_IDLE`` times ``max_queue_s`` without a change, the remaining ones would have had
    next to no queue and would have computed for at most ``MAX_BUSY`` of the time. The queue alone does not show this:
    while replicas keep up, it is empty, however many there are.
    """

    least: int
    most: int
    max_queue_s: float
    wanted: int = field(init=False, default=Factory(lambda self: self.least, takes_self=True))
    _long_since: float = field(init=False, default=math.inf)
    _short_since: float = field(init=False, default=math.inf)

    def update(self, now: float, waiting_s: float, busy: float, *, ready: int, loading: int) -> int:
        """Return the number of replicas at time ``now`` (seconds).

        Of the wanted replicas, ``ready`` are ready, ``loading`` are loading, and the rest have failed. The ready ones
        need ``waiting_s`` for all admitted work; recently, ``busy`` of them computed on average.
        """
        long_queue_s = UP_QUEUE_SHARE * self.max_queue_s
        is_long = waiting_s > long_queue_s and not loading and self.wanted < self.most
        left = min(ready, self.wanted - 1)
        is_short = (
            self.wanted > self.least
            and left > 0
            and waiting_s * ready <= NEXT_TO_NO_QUEUE * long_queue_s * left
            and busy <= MAX_BUSY * left
        )
        self._long_since = min(self._long_since, now) if is_long else math.inf
        self._short_since = min(self._short_since, now) if is_short else math.inf
        before = self.wanted
        if now - self._long_since >= UP_AFTER_S:
            needed = min(math.ceil(ready * waiting_s / long_queue_s), MAX_GROWTH * ready)
            failed = self.wanted - ready
            self.wanted = min(self.most, max(self.wanted + 1, failed + needed))
        elif now - self._short_since >= MAX_QUEUES_IDLE * self.max_queue_s:
            self.wanted -= 1
        if self.wanted != before:
            self._long_since = self._short_since = math.inf
        return self.wanted


def choose_wanted(places: Sequence[Place], wanted: int) -> None:
    """Choose which ``wanted`` of a model's places are wanted: currently wanted places first, ready ones before others.

    So failed places are removed first, then loading ones, then those with the highest number; places are added in
    order.
    """
    ranks = ("ready", "loading", "failed")
    ranked = sorted(places, key=lambda each: (not each.is_wanted, ranks.index(each.state), each.replica.number))
    for number, place in enumerate(ranked):
        place.is_wanted = number < wanted


@define(eq=False)
class QueueSeconds:
    """The seconds that a model's admitted work will take, as estimated by each API process, in shared memory."""

    estimates: npt.NDArray[np.float64]
    """Shape (processes, 2): the seconds, and the time of the estimate by ``time.monotonic``."""

    @classmethod
    def open(cls, folder: Path, model: int, workers: int) -> "QueueSeconds":
        """Map the file of the ``model``-th model, creating it if necessary."""
        return cls(shared_array(folder / f"{model}.seconds", workers, 2))

    def write(self, worker: int, seconds: float) -> None:
        """Store the estimate of an API process."""
        self.estimates[worker] = seconds, time.monotonic()

    @property
    def longest(self) -> float:
        """The longest fresh estimate: each process includes the waiting work of others. Dead processes do not count."""
        seconds, written = self.estimates.T
        return float(np.max(seconds, where=written > time.monotonic() - FRESH_S, initial=0.0))


def busy_seconds(snapshot: Snapshot) -> float:
    """Return the seconds in which an engine process had a batch in flight."""
    return sum(value for family in snapshot.families for name, _, value in family.samples if name == f"{BUSY}_total")


@define(eq=False)
class BusyShare:
    """The share of the last ``BUSY_OVER_S`` in which an engine process had a batch in flight."""

    share: float = field(init=False, default=1.0)
    """The share, from 0 to 1; it is 1 until it is known: an unobserved engine does not count as idle."""
    _counted: deque[tuple[float, float]] = field(init=False, factory=deque)
    """Times, each with the seconds with batches in flight until then."""

    def observe(self, at: float, busy_s: float) -> None:
        """Record the seconds with batches in flight until ``at``, by its machine's clock; times must increase."""
        self._counted.append((at, busy_s))
        while len(self._counted) > 1 and self._counted[1][0] <= at - BUSY_OVER_S:
            self._counted.popleft()
        begin, busy_then = self._counted[0]
        if at - begin >= BUSY_OVER_S:
            self.share = min(1.0, (busy_s - busy_then) / (at - begin))
