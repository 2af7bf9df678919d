"""How many replicas a model needs, by the time that its admitted work will take and by how busy they are."""

import math
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from attrs import Factory, define, field

from trio_pool_serve.engine.places.place import Place
from trio_pool_serve.processes.shared_array import shared_array
from trio_pool_serve.telemetry.metrics import BUSY
from trio_pool_serve.telemetry.snapshots import Snapshot

SCALING_S = 0.5
"""How often the queue is looked at."""

UP_AFTER_S = 2.0
"""How long the queue is too long before replicas are added."""

MAX_GROWTH = 2
"""Those that are ready are at most doubled, before the new ones take a part of the queue."""

UP_QUEUE_SHARE = 0.2
"""Of ``max_queue_s``, above which requests are refused: 1 s of 5 s, so that replicas are added before that."""

MAX_QUEUES_IDLE = 12
"""Times ``max_queue_s`` until a replica that is not needed is drained: a minute for 5 s, as to start one takes long."""

NEXT_TO_NO_QUEUE = 0.1
"""Share of that queue below which it would have to be with one replica fewer."""

MAX_BUSY = 0.7
"""Share of the time for which those that are left would compute: at more, a queue of several batches is usual."""

FRESH_S = 1.5
"""An estimate counts for three times the pause between two. For less than ``UP_AFTER_S``: the last one of a process
that has died adds no replicas by itself."""

WINDOW_S = 10.0
"""Over which it is counted how busy an engine process is: long beside a batch, which counts when it is done."""


@define(eq=False)
class QueueScaling:
    """The number of replicas, ``wanted``, from ``least`` to ``most``.

    Replicas are added when what waits would take longer than ``UP_QUEUE_SHARE`` of ``max_queue_s`` for ``UP_AFTER_S``:
    as many as would make it that long, at most as many as are ready. None is added while others are being started;
    those that have failed are not.

    One is taken away when those that are left would have had next to no queue for ``MAX_QUEUES_IDLE`` times
    ``max_queue_s``, in which the number did not change, and would have computed for at most ``MAX_BUSY`` of that time:
    while they can compute all that comes the queue is empty, however many there are.
    """

    least: int
    most: int
    max_queue_s: float
    wanted: int = field(init=False, default=Factory(lambda self: self.least, takes_self=True))
    _long_since: float = field(init=False, default=math.inf)
    _short_since: float = field(init=False, default=math.inf)

    def update(self, now: float, waiting_s: float, busy: float, *, ready: int, loading: int) -> int:
        """Return the number of replicas at a time (seconds).

        Of those that are wanted some are ``ready``, others ``loading``, and the rest has failed. Those that are ready
        need ``waiting_s`` for all work; on average, ``busy`` of them have computed lately.
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
    """Choose which ``wanted`` of a model's places are wanted: first the present ones, and of these the ready ones.

    So failed places are the first to be taken away, then loading ones, then the last ones; others are added from the
    first on.
    """
    ranks = ("ready", "loading", "failed")
    ranked = sorted(places, key=lambda each: (not each.is_wanted, ranks.index(each.state), each.replica.number))
    for number, place in enumerate(ranked):
        place.is_wanted = number < wanted


@define(eq=False)
class QueueSeconds:
    """The seconds that a model's admitted work will take, as each API process estimates, in memory that they share."""

    estimates: npt.NDArray[np.float64]
    """Shape (processes, 2): the seconds, and when they were estimated, by the clock that the machine's processes share.
    """

    @classmethod
    def open(cls, folder: Path, model: int, workers: int) -> "QueueSeconds":
        """Map the file of the ``model``-th model, which is created if need be."""
        return cls(shared_array(folder / f"{model}.seconds", workers, 2))

    def write(self, worker: int, seconds: float) -> None:
        """Write down the estimate of an API process."""
        self.estimates[worker] = seconds, time.monotonic()

    @property
    def longest(self) -> float:
        """The longest estimate, as each counts what others have waiting before its own. Dead processes do not count."""
        seconds, written = self.estimates.T
        return float(np.max(seconds, where=written > time.monotonic() - FRESH_S, initial=0.0))


def busy_seconds(snapshot: Snapshot) -> float:
    """Return the seconds in which an engine process had a batch in flight."""
    return sum(value for family in snapshot.families for name, _, value in family.samples if name == f"{BUSY}_total")


@define(eq=False)
class BusyShare:
    """The share of the last ``WINDOW_S`` in which an engine process had a batch in flight."""

    share: float = field(init=False, default=1.0)
    """From 0 to 1, which it is also until it is known: no engine is idle for not having been observed."""
    _counted: deque[tuple[float, float]] = field(init=False, factory=deque)
    """Times, and the seconds with batches in flight until then."""

    def observe(self, at: float, busy_s: float) -> None:
        """Record the seconds with batches in flight until a time by its machine's clock, later than before."""
        self._counted.append((at, busy_s))
        while len(self._counted) > 1 and self._counted[1][0] <= at - WINDOW_S:
            self._counted.popleft()
        begin, busy_then = self._counted[0]
        if at - begin >= WINDOW_S:
            self.share = min(1.0, (busy_s - busy_then) / (at - begin))
