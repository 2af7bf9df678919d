import pytest

from trio_pool_serve.engine.admission import MAX_RETRY_AFTER_S, Admission, DrainRate
from trio_pool_serve.errors import OverloadedError

pytestmark = pytest.mark.unit


def test_requests_are_admitted_whole_or_refused_whole():
    admission = Admission(max_tokens=10, tokens_per_s=lambda: 0.0)
    with admission.admit(6):
        with pytest.raises(OverloadedError, match="6 tokens are admitted of at most 10"), admission.admit(5):
            pytest.fail("admitted")
        with admission.admit(4):
            assert admission.admitted_tokens == 10
    assert admission.admitted_tokens == 0


def test_a_request_larger_than_the_queue_is_admitted_when_no_other_is():
    admission = Admission(max_tokens=10, tokens_per_s=lambda: 0.0)
    with admission.admit(1000):
        assert admission.admitted_tokens == 1000


def test_room_is_given_back_when_the_request_fails():
    admission = Admission(max_tokens=10, tokens_per_s=lambda: 0.0)
    with pytest.raises(ZeroDivisionError), admission.admit(5):
        _ = 1 / 0
    assert admission.admitted_tokens == 0


def test_retry_after_follows_the_measured_drain_rate():
    rate = DrainRate()
    admission = Admission(max_tokens=100, tokens_per_s=lambda: rate.tokens_per_s)
    assert admission.retry_after_s(50) == 1.0  # nothing measured yet
    rate.observe(tokens=20, seconds=2.0)
    assert rate.tokens_per_s == 10
    with admission.admit(100):
        assert admission.retry_after_s(50) == 5.0


def test_retry_after_is_bounded():
    admission = Admission(max_tokens=100, tokens_per_s=lambda: 0.1)
    with admission.admit(100):
        assert admission.retry_after_s(10_000) == MAX_RETRY_AFTER_S


def test_the_drain_rate_moves_towards_what_was_last_seen():
    rate = DrainRate()
    for _ in range(100):
        rate.observe(tokens=10, seconds=1.0)
    rate.observe(tokens=100, seconds=1.0)
    assert 10 < rate.tokens_per_s < 100
