"""How many replicas a queue needs: a pure function of times and seconds."""

import pytest

from trio_pool_serve.engine.remote.queue_scaling import UP_AFTER_S, QueueScaling, QueueSeconds

pytestmark = pytest.mark.unit

UP_S, DOWN_AFTER_S = 1.0, 60.0


def scaling(wanted: int = 1) -> QueueScaling:
    made = QueueScaling(1, 8, UP_S, DOWN_AFTER_S)
    made.wanted = wanted
    return made


def run(made: QueueScaling, waiting_s: float, *, seconds: float, begin: float = 0.0, ready: int | None = None) -> int:
    """Let a queue be so long for some seconds; all replicas are ready unless it is said how many."""
    for step in range(int(2 * seconds) + 1):
        made.update(begin + step / 2, waiting_s, made.wanted if ready is None else ready)
    return made.wanted


def test_a_queue_that_is_long_for_a_moment_changes_nothing():
    made = scaling()
    assert run(made, 9.0, seconds=UP_AFTER_S - 0.5) == 1
    assert run(made, 0.5, seconds=0, begin=10) == 1
    assert run(made, 9.0, seconds=UP_AFTER_S - 0.5, begin=20) == 1


@pytest.mark.parametrize(
    ("wanted", "waiting_s", "then"), [(1, 1.5, 2), (1, 9.0, 2), (4, 1.5, 6), (4, 9.0, 8), (6, 9.0, 8)]
)
def test_replicas_are_added_until_the_queue_is_short_at_most_doubled(wanted, waiting_s, then):
    assert run(scaling(wanted), waiting_s, seconds=UP_AFTER_S) == then


def test_none_is_added_while_others_are_being_started():
    assert run(scaling(2), 9.0, seconds=600, ready=1) == 2


def test_one_is_taken_away_at_a_time_and_never_the_last():
    made = scaling(3)
    assert run(made, 0.0, seconds=DOWN_AFTER_S - 0.5) == 3
    assert run(made, 0.0, seconds=0, begin=DOWN_AFTER_S) == 2
    assert run(made, 0.0, seconds=DOWN_AFTER_S - 0.5, begin=DOWN_AFTER_S + 0.5) == 2
    assert run(made, 0.0, seconds=600, begin=2 * DOWN_AFTER_S + 1) == 1


def test_between_a_short_and_a_long_queue_nothing_changes():
    assert run(scaling(4), UP_S / 2, seconds=6000) == 4


def test_a_queue_in_between_begins_the_wait_anew():
    made = scaling(2)
    run(made, 0.0, seconds=DOWN_AFTER_S - 1)
    run(made, UP_S / 2, seconds=0, begin=DOWN_AFTER_S - 0.5)
    assert run(made, 0.0, seconds=DOWN_AFTER_S - 1, begin=DOWN_AFTER_S) == 2


def test_a_replica_that_would_leave_a_queue_stays():
    """Two replicas with 0.08 s each: one alone would have 0.16 s, more than a tenth of ``up_queue_s``."""
    assert run(scaling(2), 0.08, seconds=600) == 2
    assert run(scaling(2), 0.04, seconds=600) == 1


def test_the_longest_estimate_of_all_processes_counts(tmp_path):
    first, second = (QueueSeconds.open(tmp_path / "0.seconds", 2) for _ in range(2))
    first.seconds[0], second.seconds[1] = 0.5, 2.5
    assert first.longest == second.longest == 2.5
