"""How much a key may use, by a clock that the test moves."""

import pytest
import trio

from trio_pool_serve.access.api_keys import KeyUsage, TokenBucket
from trio_pool_serve.access.key_file import ApiKey
from trio_pool_serve.errors import OverloadedError

pytestmark = pytest.mark.unit


def usage_of(processes: int = 1, **limits: int) -> KeyUsage:
    usage = KeyUsage(processes)
    usage.apply(ApiKey(name="a", **limits), 0.0)
    return usage


def refusal(usage: KeyUsage, now: float) -> float:
    with pytest.raises(OverloadedError) as caught:
        usage.enter(now)
    assert caught.value.reason == "api_key"
    return caught.value.retry_after_s


def test_a_minute_s_requests_may_come_at_once_and_then_at_their_rate():
    usage = usage_of(requests_per_minute=6)
    for _ in range(6):
        usage.enter(0.0)
    assert refusal(usage, 0.0) == pytest.approx(10.0)
    assert refusal(usage, 4.0) == pytest.approx(6.0)
    usage.enter(10.0)
    assert refusal(usage, 10.0) == pytest.approx(10.0)


def test_a_refused_request_uses_nothing_up():
    usage = usage_of(requests_per_minute=1, max_concurrent_requests=2)
    usage.enter(0.0)
    for _ in range(9):
        refusal(usage, 30.0)
    assert usage.running == 1
    usage.enter(60.0)


def test_a_bucket_holds_no_more_than_a_minute_s_worth():
    bucket = TokenBucket(60.0, 0.0)
    bucket.take(60, 3600.0)
    assert bucket.wait_s(1, 3600.0) == pytest.approx(1.0)


def test_an_overdrawn_bucket_is_refilled_first():
    usage = usage_of(tokens_per_minute=60)
    usage.enter(0.0)
    usage.tokens.take(180, 0.0)
    assert refusal(usage, 0.0) == pytest.approx(121.0)
    assert refusal(usage, 120.0) == pytest.approx(1.0)
    usage.enter(121.5)


def test_new_limits_keep_the_used_amounts():
    usage = usage_of(requests_per_minute=10)
    for _ in range(10):
        usage.enter(0.0)
    usage.apply(ApiKey(name="a", requests_per_minute=12), 0.0)
    usage.enter(0.0)
    usage.enter(0.0)
    assert refusal(usage, 0.0) == pytest.approx(5.0)
    usage.apply(ApiKey(name="a"), 0.0)
    usage.enter(0.0)
    assert usage.running == 13


def test_processes_share_the_limits_and_a_share_of_less_than_one_still_lets_one_through():
    usage = usage_of(4, requests_per_minute=8, max_concurrent_requests=10)
    usage.enter(0.0)
    usage.enter(0.0)
    assert refusal(usage, 0.0) == pytest.approx(30.0)
    assert usage.max_running == 3
    usage = usage_of(4, requests_per_minute=1)
    usage.enter(0.0)
    assert refusal(usage, 0.0) == pytest.approx(240.0)
    usage.enter(240.0)


async def test_a_batch_waits_until_its_tokens_are_saved_up_however_many_they_are(autojump_clock):
    """Of 60 a minute, 180 are there after two more minutes; what it takes less is there for the next."""
    usage = usage_of(tokens_per_minute=60)
    began = trio.current_time()
    async with usage.saved_up(1, 180):
        assert trio.current_time() - began == pytest.approx(120.0)
        usage.take_tokens(150)
    async with usage.saved_up(1, 30):
        assert trio.current_time() - began == pytest.approx(120.0)
        usage.take_tokens(90)
    async with usage.saved_up(1, 0):
        assert trio.current_time() - began == pytest.approx(180.0)


async def test_a_batch_waits_for_its_requests_too_and_a_cancelled_one_gives_its_tokens_back(autojump_clock):
    usage = usage_of(requests_per_minute=60, tokens_per_minute=60)
    with trio.move_on_after(30) as scope:
        async with usage.saved_up(0, 1000):
            raise AssertionError
    assert scope.cancelled_caught
    began = trio.current_time()
    async with usage.saved_up(120, 60):
        assert trio.current_time() - began == pytest.approx(60.0)
