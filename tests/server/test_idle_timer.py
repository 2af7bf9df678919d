"""Only the loop is at work here, so the clock may jump."""

import pytest
import trio
from attrs import define, field

from trio_pool_serve.server.contained_connection import IdleTimer

pytestmark = pytest.mark.unit


@define
class Connection:
    """What the timer sees of a connection and of the server."""

    shutdown: trio.Event = field(factory=trio.Event)
    closed_at: float | None = None

    async def close(self) -> None:
        self.closed_at = trio.current_time()


@define
class Group:
    """hypercorn's ``TaskGroup``, as far as the timer uses it."""

    nursery: trio.Nursery
    spawned: int = 0

    def spawn(self, function) -> None:
        self.spawned += 1
        self.nursery.start_soon(function)


@pytest.fixture
def connection() -> Connection:
    return Connection()


@pytest.fixture
def timer(connection) -> IdleTimer:
    return IdleTimer(10.0, connection.shutdown.wait, connection.close)


async def test_a_connection_is_closed_when_it_has_been_idle_for_long(connection, timer, autojump_clock):
    async with trio.open_nursery() as nursery:
        began = trio.current_time()
        await timer.restart(Group(nursery), None)
    assert connection.closed_at == pytest.approx(began + 10)


async def test_time_counts_from_the_last_request_and_no_request_needs_a_task(connection, timer, autojump_clock):
    async with trio.open_nursery() as nursery:
        group = Group(nursery)
        await timer.restart(group, None)
        for _ in range(5):
            await trio.sleep(8)
            await timer.stop()
            await trio.sleep(100)
            assert connection.closed_at is None
            await timer.restart(group, None)
        last = trio.current_time()
    assert connection.closed_at == pytest.approx(last + 10)
    assert group.spawned == 1


async def test_a_shutdown_closes_a_connection_at_once_or_when_its_request_is_answered(autojump_clock):
    for busy in (False, True):
        connection = Connection()
        timer = IdleTimer(10.0, connection.shutdown.wait, connection.close)
        async with trio.open_nursery() as nursery:
            group = Group(nursery)
            await timer.restart(group, None)
            if busy:
                await timer.stop()
            connection.shutdown.set()
            await trio.sleep(5)
            assert (connection.closed_at is None) == busy
            if busy:
                await timer.restart(group, None)


async def test_a_connection_that_ends_by_itself_is_not_closed_again(connection, timer, autojump_clock):
    async with trio.open_nursery() as nursery:
        group = Group(nursery)
        await timer.restart(group, None)
        timer.end()
        await timer.restart(group, None)
    assert connection.closed_at is None
    assert group.spawned == 1
