"""How many replicas a queue needs: a pure function of times and seconds."""

import random
import time
from collections import deque
from collections.abc import Callable
from itertools import takewhile
from pathlib import Path

import pytest
from attrs import define, field

from trio_pool_serve.engine.places.queue_scaling import (
    BUSY_OVER_S,
    FRESH_S,
    UP_AFTER_S,
    BusyShare,
    QueueScaling,
    QueueSeconds,
    choose_wanted,
)
from trio_pool_serve.engine.places.supervisor import Place, Replica

pytestmark = pytest.mark.unit

MAX_QUEUE_S, UP_S, DOWN_AFTER_S = 5.0, 1.0, 60.0


def scaling(wanted: int = 1) -> QueueScaling:
    made = QueueScaling(1, 8, MAX_QUEUE_S)
    made.wanted = wanted
    return made


def run(
    made: QueueScaling, waiting_s: float, *, seconds: float, begin: float = 0.0, busy: float = 0.0, **states: int
) -> int:
    """Let a queue be so long for some seconds; all replicas are ready unless it is said how many."""
    for step in range(int(2 * seconds) + 1):
        of_state = {"ready": made.wanted, "loading": 0, **states}
        made.update(begin + step / 2, waiting_s, busy, **of_state)
    return made.wanted


def test_a_queue_that_is_long_for_a_moment_changes_nothing():
    made = scaling()
    assert run(made, 9.0, seconds=UP_AFTER_S - 0.5) == 1
    assert run(made, 0.5, seconds=0, begin=10) == 1
    assert run(made, 9.0, seconds=UP_AFTER_S - 0.5, begin=20) == 1


@pytest.mark.parametrize(
    ("wanted", "waiting_s", "state", "then"),
    [
        # Replicas are added until the queue is short, at most doubled.
        *((1, 1.5, {}, 2), (1, 9.0, {}, 2), (4, 1.5, {}, 6), (4, 9.0, {}, 8), (6, 9.0, {}, 8)),
        (2, 9.0, {"ready": 1, "loading": 1}, 2),  # others are being started
        (3, 2.0, {"ready": 1}, 4),  # two have failed, and one that is ready needs another
        (3, 2.0, {"ready": 2}, 5),
    ],
)
def test_replicas_are_added(wanted, waiting_s, state, then):
    seconds = 600 if "loading" in state else UP_AFTER_S
    assert run(scaling(wanted), waiting_s, seconds=seconds, **state) == then


@pytest.mark.parametrize(
    ("wanted", "waiting_s", "state", "then"),
    [
        (4, UP_S / 2, {}, 4),  # neither short nor long
        (2, 0.08, {}, 2),  # one alone would have 0.16 s, more than a tenth of ``UP_S``
        (2, 0.04, {}, 1),
        (3, 0.0, {"busy": 1.5}, 3),  # three compute for half of the time: two would for three quarters
        (3, 0.0, {"busy": 1.4}, 2),
        (2, 0.0, {"ready": 0}, 2),
        (2, 0.0, {"ready": 0, "loading": 2}, 2),
        (2, 0.0, {"ready": 1, "busy": 0.8}, 2),  # one of two computes: alone it would be as it is
        (2, 0.0, {"ready": 1, "busy": 0.6}, 1),
    ],
)
def test_a_replica_is_taken_away_if_the_others_would_neither_leave_a_queue_nor_be_too_busy(
    wanted, waiting_s, state, then
):
    assert run(scaling(wanted), waiting_s, seconds=600, **state) == then


def test_one_is_taken_away_at_a_time_and_never_the_last():
    made = scaling(3)
    assert run(made, 0.0, seconds=DOWN_AFTER_S - 0.5) == 3
    assert run(made, 0.0, seconds=0, begin=DOWN_AFTER_S) == 2
    assert run(made, 0.0, seconds=DOWN_AFTER_S - 0.5, begin=DOWN_AFTER_S + 0.5) == 2
    assert run(made, 0.0, seconds=600, begin=2 * DOWN_AFTER_S + 1) == 1


def test_a_queue_in_between_begins_the_wait_anew():
    made = scaling(2)
    run(made, 0.0, seconds=DOWN_AFTER_S - 1)
    run(made, UP_S / 2, seconds=0, begin=DOWN_AFTER_S - 0.5)
    assert run(made, 0.0, seconds=DOWN_AFTER_S - 1, begin=DOWN_AFTER_S) == 2


def replicas_of(*states: str, wanted: int) -> list[Place]:
    """Return replicas, of which the first ones are wanted."""
    made = [Place(Replica("m", "cpu", n, len(states), n, len(states)), Path(), None) for n in range(len(states))]
    for number, (replica, state) in enumerate(zip(made, states, strict=True)):
        replica.state, replica.is_wanted = state, number < wanted
    return made


@pytest.mark.parametrize(
    ("states", "kept"),
    [
        (("failed", "ready", "ready"), [1, 2]),
        (("loading", "ready", "ready"), [1, 2]),
        (("ready", "failed", "loading"), [0, 2]),
        (("ready", "ready", "ready"), [0, 1]),
    ],
)
def test_those_that_failed_are_taken_away_first_then_those_that_load_then_the_last(states, kept):
    replicas = replicas_of(*states, wanted=3)
    choose_wanted(replicas, 2)
    assert [place.replica.number for place in replicas if place.is_wanted] == kept


def test_those_that_are_added_are_the_first_of_the_others_and_those_that_are_wanted_stay():
    replicas = replicas_of("failed", "ready", "ready", "loading", "loading", wanted=3)
    choose_wanted(replicas, 2)
    replicas[3].state = "failed"
    choose_wanted(replicas, 3)
    assert [place.replica.number for place in replicas if place.is_wanted] == [1, 2, 4]
    choose_wanted(replicas, 4)
    assert [place.replica.number for place in replicas if place.is_wanted] == [0, 1, 2, 4]


def test_the_longest_estimate_counts_until_it_is_forgotten_before_it_could_add_replicas(tmp_path):
    first, second = (QueueSeconds.open(tmp_path, 0, 2) for _ in range(2))
    assert first.longest == 0.0
    first.write(0, 0.5)
    second.write(1, 2.5)
    assert first.longest == second.longest == 2.5
    first.estimates[1, 1] = time.monotonic() - FRESH_S
    assert first.longest == second.longest == 0.5
    assert FRESH_S < UP_AFTER_S


MARGIN = 1.25
"""The estimate of the queue in seconds is as much too long."""

SERVICE_S, STEP_S, COUNTED_S = 0.015, 0.5, 2.0


@define(eq=False)
class PoissonQueue:
    """Requests that arrive at random, of ``load(time)`` times what one replica can compute; ``start_s`` to load one.

    All that are ready share the work, so that each is as busy as all are.
    """

    load: Callable[[float], float]
    start_s: float
    scaling: QueueScaling = field(factory=scaling)
    now: float = 0.0
    ready: int = 1
    changes: list[tuple[float, int]] = field(factory=list)
    """When there were to be how many."""
    _random: random.Random = field(factory=lambda: random.Random(0))
    _work_s: float = 0.0
    _busy_s: float = 0.0
    _busy: BusyShare = field(factory=BusyShare)
    _loaded_at: deque[float] = field(factory=deque)

    def run(self, seconds: float) -> float:
        """Let time pass; return the share of the requests that were refused."""
        arrived = refused = 0
        until = self.now + seconds
        while self.now < until:
            of_step = self._random_arrivals()
            arrived += len(of_step)
            for pause_s in of_step:
                self._compute(pause_s)
                if MARGIN * self._work_s / self.ready > MAX_QUEUE_S:
                    refused += 1
                else:
                    self._work_s += SERVICE_S
            self._compute(STEP_S - sum(of_step))
            self.now += STEP_S
            self._scale()
        return refused / arrived

    def _random_arrivals(self) -> list[float]:
        """Return the pauses before each of the requests of the next step. Poisson: beginning anew changes nothing."""
        rate, arrivals, at = self.load(self.now) / SERVICE_S, list[float](), 0.0
        while (pause_s := self._random.expovariate(rate)) + at < STEP_S:
            arrivals.append(pause_s)
            at += pause_s
        return arrivals

    def _compute(self, seconds: float) -> None:
        busy_s = min(seconds, self._work_s / self.ready)
        self._busy_s += busy_s
        self._work_s -= busy_s * self.ready

    def _scale(self) -> None:
        if self.now % COUNTED_S == 0:
            self._busy.observe(self.now, self._busy_s)
        loaded = [*takewhile(lambda at: at <= self.now, self._loaded_at)]
        for _ in loaded:
            self._loaded_at.popleft()
            self.ready += 1
        before, busy = self.scaling.wanted, self._busy.share * self.ready
        waiting_s = MARGIN * self._work_s / self.ready
        wanted = self.scaling.update(self.now, waiting_s, busy, ready=self.ready, loading=len(self._loaded_at))
        if wanted == before:
            return
        self.changes.append((self.now, wanted))
        if wanted > before:
            self._loaded_at.extend([self.now + self.start_s] * (wanted - before))
        elif self._loaded_at:
            self._loaded_at.pop()
        else:
            self.ready -= 1


@pytest.mark.parametrize("start_s", [5.0, 60.0])
@pytest.mark.parametrize(("load", "settled"), [(1.2, {2}), (1.5, {2, 3}), (1.9, {3}), (2.5, {4})])
def test_at_a_steady_load_the_number_settles_and_nothing_is_refused(load, settled, start_s):
    queue = PoissonQueue(lambda _: load, start_s)
    queue.run(600)
    assert queue.ready == queue.scaling.wanted
    assert queue.ready in settled
    queue.changes.clear()
    assert queue.run(3600) < 1e-4
    assert queue.changes == []


def test_how_busy_an_engine_is_is_unknown_at_first_and_then_follows_the_last_seconds():
    busy = BusyShare()
    assert busy.share == 1.0
    for second in range(int(BUSY_OVER_S)):
        busy.observe(second, 0.25 * second)
        assert busy.share == 1.0
    busy.observe(BUSY_OVER_S, 0.25 * BUSY_OVER_S)
    assert busy.share == pytest.approx(0.25)
    busy.observe(2 * BUSY_OVER_S, 0.25 * BUSY_OVER_S)
    assert busy.share == 0.0
    busy.observe(3 * BUSY_OVER_S, 3 * BUSY_OVER_S)  # a batch that took longer counts when it is done
    assert busy.share == 1.0
    busy.observe(4 * BUSY_OVER_S, 3.5 * BUSY_OVER_S)
    assert busy.share == pytest.approx(0.5)
