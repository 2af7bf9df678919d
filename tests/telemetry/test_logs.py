"""How events and errors are written."""

import json
import logging
import sys

import pytest
import trio

from trio_pool_serve.config import LoggingConfig
from trio_pool_serve.telemetry.logs import AccessLog, formatter_of, logs_json, places_of

pytestmark = pytest.mark.unit

SECRET = "SECRET-4711"


def fails(depth: int = 0) -> None:
    if depth:
        fails(depth - 1)
    raise ValueError(SECRET)


def record_of_a_failure() -> logging.LogRecord:
    try:
        try:
            fails(2)
        except ValueError as error:
            raise ExceptionGroup(SECRET, [KeyError(SECRET), error]) from error
    except ExceptionGroup:
        return logging.LogRecord("a.logger", logging.ERROR, "/a/path.py", 1, "it %s", ("failed",), sys.exc_info())


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_an_error_is_logged_by_types_and_places_without_text_or_path_except_for_debugging(log_format):
    debugged = formatter_of(LoggingConfig(log_format=log_format, log_level="debug")).format(record_of_a_failure())
    assert SECRET in debugged
    assert __file__ in debugged
    line = formatter_of(LoggingConfig(log_format=log_format)).format(record_of_a_failure())
    assert "it failed" in line
    assert "ExceptionGroup" in line
    assert "KeyError" in line
    assert line.count("ValueError") == 1
    assert "tests.telemetry.test_logs:20 fails" in line
    assert SECRET not in line
    assert ".py" not in line


def test_an_error_without_end_is_cut_off():
    try:
        fails(900)
    except ValueError as error:
        places = places_of((ValueError, error, error.__traceback__))
    assert 30 < len(places.splitlines()) < 50


def test_an_event_is_one_object_or_one_line():
    record = logging.LogRecord("a.logger", logging.INFO, "/a/path.py", 1, "request", (), None)
    record.status, record.client, record.model = 200, "a\nb", None
    written = json.loads(formatter_of(LoggingConfig(log_format="json")).format(record))
    assert written == {
        "time": record.created,
        "level": "INFO",
        "logger": "a.logger",
        "process": record.process,
        "message": "request",
        "status": 200,
        "client": "a\nb",
        "model": None,
    }
    line = formatter_of(LoggingConfig(log_format="text")).format(record)
    assert line.endswith(" INFO a.logger: request status=200 client='a\\nb'")


def test_json_is_for_whatever_is_no_terminal(monkeypatch):
    for is_terminal in (False, True):
        monkeypatch.setattr(sys.stderr, "isatty", lambda answer=is_terminal: answer)
        assert logs_json(LoggingConfig()) is not is_terminal
        assert logs_json(LoggingConfig(log_format="json"))
        assert not logs_json(LoggingConfig(log_format="text"))


# -- the access log, by a clock that the test moves ----------------------------------------------------------


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


def test_failures_have_a_rate_of_their_own(log, caplog):
    for status in (200,) * 9 + (500,) * 9:
        log.add({"status": status, "outcome": ""}, failed=status == 500)
    assert statuses(caplog) == [200] * 3 + [500] * 3
    assert [record.levelname for record in caplog.records] == ["INFO"] * 3 + ["WARNING"] * 3


def test_without_the_access_log_only_failures_are_wanted():
    assert [AccessLog(only_failures=True).wants(failed=failed) for failed in (False, True)] == [False, True]
    assert [AccessLog().wants(failed=failed) for failed in (False, True)] == [True, True]


async def test_counts_of_left_out_events_are_logged_once_a_second_and_at_the_end(log, caplog, autojump_clock):
    async with trio.open_nursery() as nursery:
        nursery.start_soon(log.run)
        for _ in range(2):
            for _ in range(1000):
                log.add({"status": 200, "outcome": "answered"}, failed=False)
            await trio.sleep(1.5)
            log.clock.now += 1.5
        for status in (*[429] * 5, None):
            log.add({"status": status, "outcome": "client left"}, failed=False)
        nursery.cancel_scope.cancel(reason="the test is over")
    left_out = [record.left_out for record in caplog.records if record.message != "request"]
    assert left_out == [{"200": 997}, {"200": 997}, {"429": 2, "client left": 1}]
    assert statuses(caplog) == [200] * 6 + [429] * 3
