"""Engines of this process that are connected to by TCP."""

from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import trio

from tests.engine.remote.replicas import Replica, asking, frame_of
from trio_pool_serve.engine.engine import Engine
from trio_pool_serve.engine.remote.wire import Hello


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


@pytest.fixture
async def played(make: Callable[..., Replica]) -> AsyncIterator[tuple[Engine, trio.SocketStream]]:
    """An engine linked to an engine process that the test plays, and the stream by which it does."""
    replica = make()
    async with replica.listen(), asking(replica) as engine, await replica.accept() as stream:
        await stream.send_all(frame_of(Hello(8, 0, 2048)))
        await engine.wait_ready()
        yield engine, stream
