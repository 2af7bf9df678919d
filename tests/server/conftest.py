"""Fixtures of the tests of real servers."""

from pathlib import Path

import pytest

from tests.server.server_process import make_pipes


@pytest.fixture
def pipes(tmp_path: Path) -> Path:
    return make_pipes(tmp_path)
