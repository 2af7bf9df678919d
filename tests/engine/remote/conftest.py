"""Engines of this process that are connected to by TCP."""

from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from tests.engine.remote.replicas import Replica, asking
from trio_pool_serve.engine.engine import Engine


@pytest.fixture
def make(tmp_path: Path, one_in_flight: None):
    def make(number: int = 0, **options) -> Replica:
        return Replica(tmp_path / f"{number}.engine", by_tcp=True, **options)

    return make


@pytest.fixture
async def replica(make: Callable[..., Replica]) -> AsyncIterator[Replica]:
    replica = make()
    async with replica.listen(), replica.live():
        yield replica


@pytest.fixture
async def engine(replica: Replica) -> AsyncIterator[Engine]:
    async with asking(replica) as engine:
        await engine.wait_ready()
        yield engine
