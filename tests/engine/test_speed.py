"""Rates of an engine, from the batches that leave rows waiting."""

import math

import pytest

from trio_pool_serve.engine.speed import BATCHES, MIN_BATCHES, ComputeRates, work_class

pytestmark = pytest.mark.unit


def observed(*batches: tuple[int, int, float, bool]) -> ComputeRates:
    rates = ComputeRates()
    for measured_class, tokens, seconds, left_waiting in batches:
        for _ in range(MIN_BATCHES):
            rates.observe(measured_class, tokens, seconds, left_waiting=left_waiting)
    return rates


def test_classes_are_octaves_of_length_with_images_apart():
    assert [work_class(tokens) for tokens in (0, 1, 2, 3, 4, 511, 512, 10**9)] == [0, 0, 1, 1, 2, 8, 9, 15]
    assert work_class(512, has_images=True) == 16 + 9


def test_an_unknown_class_has_the_rate_of_the_nearest_of_its_kind():
    rates = observed((3, 10, 1.0, True), (9, 10, 2.0, True), (16 + 8, 10, 4.0, True))
    rates = rates.seconds_per_token
    assert rates[:6] == pytest.approx([0.1] * 6)
    assert rates[7:16] == pytest.approx([0.2] * 9)
    assert rates[16:] == pytest.approx([0.4] * 16)


def test_small_batches_of_an_idle_server_do_not_make_it_look_slow():
    rates = observed((4, 100, 1.0, False), (4, 10, 1.0, False))
    assert math.isnan(rates.seconds_per_token[4])
    for _ in range(MIN_BATCHES):
        assert math.isnan(rates.seconds_per_token[4])
        rates.observe(4, 50, 1.0, left_waiting=True)  # how it drains
        rates.observe(4, 10, 1.0, left_waiting=False)
    assert rates.seconds_per_token[4] == pytest.approx(1 / 50)


def test_a_batch_that_had_to_be_compiled_first_counts_as_a_slow_one():
    rates = ComputeRates()
    for seconds in (10.0, 0.1, 0.1, 0.1, 0.1, 0.1):
        rates.observe(4, 1000, seconds, left_waiting=True)
    assert rates.seconds_per_token[4] == pytest.approx(1.5 * 0.1 / 1000)
    for _ in range(BATCHES):
        rates.observe(4, 1000, 0.1, left_waiting=True)
    assert rates.seconds_per_token[4] == pytest.approx(0.1 / 1000)


def test_threads_that_finish_one_just_behind_the_other_are_as_fast_as_both_together():
    rates = ComputeRates()
    for seconds in (0.01, 0.99) * BATCHES:
        rates.observe(4, 100, seconds, left_waiting=True)
    assert rates.seconds_per_token[4] == pytest.approx(0.5 / 100)


def test_the_time_from_batch_to_batch_counts_while_rows_wait_and_idle_time_does_not():
    rates = ComputeRates()
    assert rates.drain_s(launched=10.0, done=11.0, left_waiting=True) == 1.0
    assert rates.drain_s(launched=12.5, done=13.0, left_waiting=True) == 2.0  # the launch was late
    assert rates.drain_s(launched=12.0, done=14.0, left_waiting=False) == 1.0  # another thread's, at the same time
    assert rates.drain_s(launched=20.0, done=21.0, left_waiting=True) == 1.0
    rates.note_idle()  # what was left has been withdrawn
    assert rates.drain_s(launched=90.0, done=91.0, left_waiting=True) == 1.0
    rates.drain_s(launched=95.0, done=95.0, left_waiting=False)  # batches that do not count
    assert rates.drain_s(launched=100.0, done=101.0, left_waiting=False) == 1.0
