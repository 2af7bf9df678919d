"""The rate of the access log, by a clock that the test moves."""

import logging

import pytest
import trio

from trio_pool_serve.telemetry.logs import AccessLog


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def log(clock, caplog, monkeypatch) -> AccessLog:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr("trio_pool_serve.telemetry.logs.MAX_PER_PERIOD", 3)
    return AccessLog(clock=clock)


def statuses(caplog) -> list[object]:
    return [record.status for record in caplog.records if record.message == "request"]


def test_past_the_rate_events_are_counted_by_status(log, clock, caplog):
    for status in (200, 200, 200, 200, 404, 200, None):
        log.add({"status": status, "outcome": "client left"}, failed=False)
    assert statuses(caplog) == [200, 200, 200]
    assert log.left_out == {"200": 2, "404": 1, "client left": 1}
    clock.now += 1
    log.add({"status": 404, "outcome": "refused"}, failed=False)
    assert statuses(caplog) == [200, 200, 200, 404]


def test_failures_have_a_rate_of_their_own(log, caplog):
    for status in (200,) * 9 + (500,) * 9:
        log.add({"status": status, "outcome": ""}, failed=status == 500)
    assert statuses(caplog) == [200] * 3 + [500] * 3
    assert [record.levelname for record in caplog.records] == ["INFO"] * 3 + ["WARNING"] * 3


def test_without_the_access_log_only_failures_are_wanted():
    assert [AccessLog(only_failures=True).wants(failed=failed) for failed in (False, True)] == [False, True]
    assert [AccessLog().wants(failed=failed) for failed in (False, True)] == [True, True]


async def test_what_was_left_out_is_logged_once_a_second_and_in_the_end(log, caplog, autojump_clock):
    async with trio.open_nursery() as nursery:
        nursery.start_soon(log.run)
        for _ in range(2):
            for _ in range(1000):
                log.add({"status": 200, "outcome": "answered"}, failed=False)
            await trio.sleep(1.5)
            log.clock.now += 1.5
        for _ in range(5):
            log.add({"status": 429, "outcome": "refused"}, failed=False)
        nursery.cancel_scope.cancel(reason="the test is over")
    left_out = [record.left_out for record in caplog.records if record.message != "request"]
    assert left_out == [{"200": 997}, {"200": 997}, {"429": 2}]
