"""Engines of this process that are connected to by TCP."""

from pathlib import Path

import pytest

from tests.engine.remote.replicas import Replica


@pytest.fixture
def make(tmp_path: Path, one_in_flight: None):
    def make(number: int = 0, **options) -> Replica:
        return Replica(tmp_path / f"{number}.engine", by_tcp=True, **options)

    return make
