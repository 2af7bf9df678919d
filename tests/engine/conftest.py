"""A dispatcher at work on scripted devices."""

import pytest
import trio
from trio.testing import MockClock

from tests.engine.scripted_devices import Floor
from tests.engine.virtual_time import patch_time


@pytest.fixture
def floor(mock_clock: MockClock, nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch) -> Floor:
    patch_time(monkeypatch)
    return Floor(mock_clock, nursery)
