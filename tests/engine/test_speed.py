"""Rates of an engine, from the batches that leave rows waiting, and the cost of a pass."""

import math
import random

import pytest

from trio_pool_serve.engine.speed import BATCHES, MIN_BATCHES, ComputeRates, PassCost, work_class

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


# -- the cost of a pass -------------------------------------------------------------------------------


def measured(constant_s: float, token_s: float, *sizes: int, repeats: int = 20) -> PassCost:
    """Passes of these numbers of tokens, each up to a tenth faster or slower than the line."""
    cost, noise = PassCost(), random.Random(0)
    for _ in range(repeats):
        for tokens in sizes:
            cost.observe(tokens, (constant_s + token_s * tokens) * noise.uniform(0.9, 1.1))
    return cost


@pytest.mark.parametrize(("constant_s", "token_s"), [(0.0016, 3.5e-5), (0.018, 2.6e-4), (0.005, 4e-6)])
def test_a_pass_has_a_constant_part_and_a_part_for_each_token(constant_s, token_s):
    cost = measured(constant_s, token_s, 34, 272, 2048, 16384)
    assert cost.constant_s == pytest.approx(constant_s, rel=0.15)
    assert cost.token_s == pytest.approx(token_s, rel=0.15)
    assert cost.seconds(8192) == pytest.approx(constant_s + 8192 * token_s, rel=0.15), "of a size that was not measured"


def test_while_all_passes_have_one_size_no_part_is_known_to_be_constant():
    cost = measured(0.008, 1e-4, 34)
    assert cost.constant_s == 0
    assert cost.seconds(68) == pytest.approx(2 * cost.seconds(34)), "of a larger pass, none may be"
    assert cost.seconds(17) == cost.seconds(34), "of a smaller one, all may be"


def test_before_anything_is_measured_a_pass_takes_no_time_and_a_short_one_has_one_row():
    cost = PassCost()
    assert (cost.constant_s, cost.seconds(2048), cost.short_tokens) == (0, 0, 1)


def test_a_pass_that_took_far_too_long_is_soon_forgotten():
    """As the first of a shape, which is compiled."""
    cost = measured(0.002, 1e-4, 34, 272)
    cost.observe(1000, 2.0)
    for _ in range(16):
        for tokens in (34, 272, 1000):
            cost.observe(tokens, 0.002 + 1e-4 * tokens)
    assert cost.seconds(1000) == pytest.approx(0.102, rel=0.2)
    assert cost.seconds(34) == pytest.approx(0.0054, rel=0.2)


def test_a_device_that_becomes_slower_is_measured_anew():
    cost = measured(0.002, 1e-4, 34, 272)
    for _ in range(20):
        for tokens in (34, 272):
            cost.observe(tokens, 3 * (0.002 + 1e-4 * tokens))
    assert cost.constant_s == pytest.approx(0.006, rel=0.3)
    assert cost.token_s == pytest.approx(3e-4, rel=0.1)


def shortened(constant_s: float, token_s: float, row_tokens: int) -> set[int]:
    """Compute short passes of rows of ``row_tokens`` tokens, and single rows between; return the last passes' rows."""
    cost, rows = PassCost(), []
    for _ in range(40):
        rows.append(max(1, cost.short_tokens // row_tokens))
        for tokens in (16, rows[-1] * row_tokens):
            cost.observe(tokens, constant_s + token_s * tokens)
    return set(rows[-10:])


def test_a_short_pass_takes_20_ms_or_longer_if_more_than_a_third_of_it_were_constant():
    assert shortened(0.002, 1e-4, 34) == {5}, "0.019 s, and 0.0224 s with one more"
    assert shortened(0.0, 4e-4, 34) == {1}, "no part is constant"
    assert shortened(0.018, 2.6e-4, 34) == {4}, "0.053 s: 0.018 s of it would be needed for one row as well"
    assert shortened(0.002, 1e-4, 512) == {1}, "a longer row is a pass of its own"


def test_a_short_pass_has_at_most_twice_the_tokens_of_a_pass_that_was_measured():
    cost = PassCost()
    for tokens in (10, 20, 40):
        cost.observe(tokens, 0.0033 + 1e-6 * tokens)
    assert cost.short_tokens == 80


def test_no_number_that_an_engine_process_sends_stops_the_measurement():
    cost = PassCost()
    for tokens, seconds in ((10, 1e-300), (1000, 0.1), (2**60, 1e9), (10, 1e9)):
        cost.observe(tokens, seconds)
        assert cost.short_tokens >= 1
        assert math.isfinite(cost.seconds(2048))


def test_where_more_tokens_take_no_longer_a_short_pass_has_twice_as_many_as_were_measured():
    cost = PassCost()
    cost.observe(64, 0.2)
    cost.observe(256, 0.1)
    assert cost.constant_s > 0
    assert cost.short_tokens == 512
