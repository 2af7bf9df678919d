"""The pauses between restarts."""

from trio_pool_serve.processes.child_process import RestartBackoff


def test_pauses_follow_each_other_and_the_last_repeats():
    backoff = RestartBackoff((0.0, 1.0, 5.0), stable_after_s=60)
    assert [backoff.next_pause_s(0.1) for _ in range(5)] == [0.0, 1.0, 5.0, 5.0, 5.0]


def test_a_run_that_was_stable_begins_them_again():
    backoff = RestartBackoff((0.0, 1.0, 5.0), stable_after_s=60)
    assert [backoff.next_pause_s(ran_s) for ran_s in (1, 1, 60, 61, 1)] == [0.0, 1.0, 5.0, 0.0, 1.0]


def test_each_has_its_own_count():
    first, second = (RestartBackoff((0.0, 1.0), stable_after_s=60) for _ in range(2))
    assert [first.next_pause_s(1), first.next_pause_s(1), second.next_pause_s(1)] == [0.0, 1.0, 0.0]
