"""Which engine gets a row, decided over engines of which only the numbers are known."""

import random
from collections import Counter

import numpy as np
import pytest
from attrs import define, field

from trio_pool_serve.engine.compute_rates import UNKNOWN, WORK_CLASSES, SecondsPerToken
from trio_pool_serve.engine.queue import BULK_TOKENS, MAX_TOKENS_BEFORE_LONG
from trio_pool_serve.engine.remote.routing import COMPARED, OTHER_ZONE_S, Routing, rate_of
from trio_pool_serve.types import Embed, PoolingRequest, RenderedPrompt

pytestmark = pytest.mark.unit


def rates(seconds_per_token: float) -> SecondsPerToken:
    return np.full(WORK_CLASSES, seconds_per_token)


@define(eq=False)
class Known:
    """What routing reads of a link."""

    position: int = 0
    waiting_tokens: int = 0
    background_tokens: int = 0
    zone: str = ""
    seconds_per_token: SecondsPerToken = field(factory=lambda: UNKNOWN)
    tokens_per_s: float = 0.0
    takes_rows: bool = True
    is_stalled: bool = False

    @property
    def is_usable(self) -> bool:
        return self.takes_rows and not self.is_stalled


def routing(*engines: Known, zone: str = "", seed: int = 0) -> Routing:
    made = Routing(zone, random=random.Random(seed))
    for engine in engines:
        made.add(engine)
    return made


def row(tokens: int) -> PoolingRequest:
    return PoolingRequest(RenderedPrompt(np.zeros(tokens, np.int32)), (Embed(),))


def send(made: Routing, tokens: int, count: int = 1) -> Counter[int]:
    """Send rows one by one; return how many each position got."""
    got: Counter[int] = Counter()
    for _ in range(count):
        engine = made.choose(row(tokens), made.candidates())
        engine.waiting_tokens += tokens
        got[engine.position] += 1
    return got


def test_engines_whose_rates_are_unknown_get_equal_tokens():
    assert send(routing(Known(0), Known(1), Known(2)), 10, 300) == {0: 100, 1: 100, 2: 100}


def test_an_engine_gets_tokens_as_it_is_fast():
    fast, slow = Known(0, seconds_per_token=rates(1e-4)), Known(1, seconds_per_token=rates(4e-4))
    assert send(routing(fast, slow), 10, 500) == {0: 400, 1: 100}


def test_an_engine_whose_rate_is_unknown_counts_as_the_mean_of_the_others():
    known = [Known(0, seconds_per_token=rates(1e-4)), Known(1, seconds_per_token=rates(3e-4)), Known(2)]
    got = send(routing(*known), 10, 1100)
    assert got == {0: 600, 1: 200, 2: 300}


def test_an_old_rate_gives_way_to_what_was_computed_since():
    slow_once = Known(seconds_per_token=rates(1e-2), tokens_per_s=10_000.0)
    assert rate_of(slow_once, 3) == pytest.approx(1e-4)
    assert rate_of(Known(seconds_per_token=rates(1e-4), tokens_per_s=100.0), 3) == pytest.approx(1e-4), "small batches"
    assert rate_of(Known(tokens_per_s=100.0), 3) is None


def test_engines_that_stall_or_take_no_rows_are_left_out_while_there_are_others():
    stalled, draining, good = Known(0, is_stalled=True), Known(1, takes_rows=False), Known(2, 10**6)
    assert routing(stalled, draining, good).candidates() == [good]
    assert routing(stalled, draining).candidates() == [stalled]
    assert routing(draining).candidates() == []


def test_engines_that_are_removed_are_not_candidates_and_may_come_back_in_their_place():
    first, second = Known(0), Known(1)
    made = routing(first, second)
    made.remove(first)
    made.remove(first)
    assert made.candidates() == made.ready == [second]
    made.add(first)
    assert made.ready == [first, second]


def test_of_many_engines_some_are_compared_and_all_get_rows():
    engines = [Known(number) for number in range(50)]
    made = routing(*engines)
    assert {len(made.candidates()) for _ in range(20)} == {COMPARED}
    got = send(made, 10, 5000)
    assert set(got) == set(range(50))
    assert max(got.values()) < 1.2 * min(got.values())


def test_if_none_of_those_compared_is_usable_all_are():
    engines = [Known(number, is_stalled=True) for number in range(200)]
    engines[77].is_stalled = False
    assert routing(*engines).candidates() == [engines[77]]


def test_rows_stay_in_their_zone_until_another_is_clearly_faster():
    near, far = Known(0, zone="a", seconds_per_token=rates(1e-4)), Known(1, zone="b", seconds_per_token=rates(1e-4))
    made = routing(near, far, zone="a")
    got = send(made, 10, 50)
    assert got[0] * 10 * 1e-4 <= OTHER_ZONE_S + 10 * 1e-4
    assert got[1] == 50 - got[0]
    assert got == {0: 50}, "50 ms are not waited for yet"
    assert send(made, 10, 100) == {0: 50, 1: 50}


def test_engines_of_other_zones_compute_what_those_of_the_own_cannot():
    near, far = Known(0, zone="a", is_stalled=True), Known(1, zone="b")
    assert send(routing(near, far, zone="a"), 10, 10) == {1: 10}
    assert send(routing(Known(1, zone="b"), zone="a"), 10, 10) == {1: 10}


@pytest.mark.parametrize("zone", ["a", "b"])
def test_an_engine_is_removed_when_its_zone_is_not_known_any_more(zone):
    """As that of one that is lost."""
    lost, other = Known(0, zone=zone), Known(1, zone="a")
    made = routing(lost, other, zone="a")
    lost.zone = ""
    made.remove(lost)
    assert made.candidates() == made.ready == [other]


def test_of_many_engines_of_which_most_get_no_rows_those_that_do_are_compared():
    engines = [Known(number, takes_rows=number % 10 == 0) for number in range(100)]
    made = routing(*engines)
    assert {len(made.candidates()) for _ in range(20)} == {COMPARED}
    assert set(send(made, 10, 1000)) == set(range(0, 100, 10))


def test_background_work_goes_where_there_is_least_of_it_and_other_rows_do_not_mind_it():
    made = routing(Known(0, background_tokens=10**6), Known(1, waiting_tokens=20), Known(2, background_tokens=10))
    assert made.choose_for_background(100, made.candidates()).position == 2
    assert send(made, 10, 3)[1] == 0


def test_without_a_zone_all_are_equal():
    assert send(routing(Known(0, zone="a"), Known(1, zone="b")), 10, 100) == {0: 50, 1: 50}


@pytest.mark.parametrize("count", [2, COMPARED])
def test_long_rows_fill_the_last_engine_first(count):
    made = routing(*(Known(number) for number in range(count)))
    send(made, 10, 400 * count)
    for engine in made.ready:
        engine.waiting_tokens = 0
    tokens = BULK_TOKENS + 1
    got = send(made, tokens, MAX_TOKENS_BEFORE_LONG // tokens + 1)
    assert set(got) == {count - 1}
    assert set(send(made, tokens)) == {count - 2}


def test_long_rows_of_many_api_processes_that_know_nothing_of_each_other_do_not_meet_at_one_engine():
    got: Counter[int] = Counter()
    for seed in range(100):
        made = routing(*(Known(number) for number in range(100)), seed=seed)
        send(made, 10, 400)
        for engine in made.ready:
            engine.waiting_tokens = 0
        got += send(made, BULK_TOKENS + 1, 4)
    assert max(got.values()) <= 2 * COMPARED * got.total() / 100
    assert sum(got[number] for number in range(50, 100)) > 0.9 * got.total(), "and yet they keep together"
