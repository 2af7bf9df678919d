"""The steps of a start, as they are reported and shown."""

import os
import sys
from collections.abc import Iterator

import pytest

from trio_pool_serve.telemetry.start_display import (
    QUIET,
    download_bar,
    end_display,
    is_displayed,
    report_items,
    report_phase,
    report_step,
    show_steps_with,
    shows_steps,
)

pytestmark = pytest.mark.unit


@pytest.fixture(autouse=True)
def display(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in QUIET:
        monkeypatch.setenv(name, "set")  # and so restored, whatever a test sets
        monkeypatch.delenv(name)
    report_phase("")
    yield
    report_phase("")
    end_display()


def test_steps_are_shown_with_their_phase_until_the_display_ends():
    shown: list[str] = []
    report_step("nobody sees this")
    show_steps_with(shown.append)
    report_phase("Loading m")
    report_step("importing torch")
    assert [*report_items("ab", "quantising")] == ["a", "b"]
    end_display()
    report_step("nor this")
    assert shown == [
        "Loading m", "Loading m: importing torch", "Loading m: quantising, 1 of 2", "Loading m: quantising, 2 of 2",
    ]  # fmt: skip
    assert not shows_steps()


def test_a_download_reports_its_bytes_and_prints_nothing(capfd):
    assert download_bar("fetching a/b") is None
    shown: list[str] = []
    show_steps_with(shown.append)
    made = download_bar("fetching a/b")
    assert made is not None
    with made(total=2_000_000, unit="B", unit_scale=True, mininterval=0) as bar:
        bar.update(500_000)
        bar.set_description("half of it")
    assert shown[0] == "fetching a/b, 0.00B of 2.00MB"
    assert "fetching a/b, 500kB of 2.00MB" in shown
    with made(total=3, desc="Fetching 3 files"):
        assert all("of 2.00MB" in step for step in shown)
    assert capfd.readouterr().err == ""


def test_libraries_are_quiet_unless_the_user_has_set_their_variables(monkeypatch):
    monkeypatch.setenv("TRANSFORMERS_VERBOSITY", "info")
    show_steps_with(lambda _: None)
    assert os.environ["TRANSFORMERS_VERBOSITY"] == "info"
    assert os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] == "1"


def test_the_line_names_the_phase_in_one_line_and_is_removed(monkeypatch, capfd):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    from trio_pool_serve.telemetry.terminal import begin_display  # only now: its console asks once for a terminal

    begin_display("Importing packages")
    assert is_displayed()
    report_phase("Loading a model with a [bold]name that is longer than the terminal is wide")
    end_display()
    assert not is_displayed()
    written = capfd.readouterr().err
    assert "Importing packages" in written
    assert "[bold]name" in written
    assert "…" in written
    assert written.endswith("\x1b[2K")
    end_display()
    assert capfd.readouterr().err == ""
