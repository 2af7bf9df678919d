"""Idle connections end after a while; only the loop is at work here, so the clock may jump."""

import pytest
import trio
from attrs import define, field

from trio_pool_serve.server.contained_connection import IdleTimer

pytestmark = pytest.mark.unit


@define
class Connection:
    """What the timer sees of a connection and of the server, and hypercorn's ``TaskGroup`` as far as it is used."""

    nursery: trio.Nursery
    timer: IdleTimer = field(init=False)
    shutdown: trio.Event = field(factory=trio.Event)
    closed_at: float | None = None
    spawned: int = 0

    def __attrs_post_init__(self) -> None:
        self.timer = IdleTimer(10.0, self.shutdown.wait, self.close)

    async def close(self) -> None:
        self.closed_at = trio.current_time()

    def spawn(self, function) -> None:
        self.spawned += 1
        self.nursery.start_soon(function)

    async def be_idle(self) -> None:
        await self.timer.restart(self, None)


async def test_time_counts_from_the_last_request_and_no_request_needs_a_task(autojump_clock):
    async with trio.open_nursery() as nursery:
        connection = Connection(nursery)
        await connection.be_idle()
        for _ in range(5):
            await trio.sleep(8)
            await connection.timer.stop()
            await trio.sleep(100)
            assert connection.closed_at is None
            await connection.be_idle()
        last = trio.current_time()
    assert connection.closed_at == pytest.approx(last + 10)
    assert connection.spawned == 1


@pytest.mark.parametrize("busy", [False, True])
async def test_a_shutdown_closes_a_connection_at_once_or_when_its_request_is_answered(autojump_clock, busy):
    async with trio.open_nursery() as nursery:
        connection = Connection(nursery)
        await connection.be_idle()
        if busy:
            await connection.timer.stop()
        connection.shutdown.set()
        await trio.sleep(5)
        assert (connection.closed_at is None) == busy
        if busy:
            await connection.timer.stop()  # one of several HTTP/2 requests has been answered
            await trio.sleep(5)
            assert connection.closed_at is None
            await connection.be_idle()
        nursery.cancel_scope.deadline = trio.current_time() + 1
    assert connection.closed_at == (10 if busy else 0)


async def test_a_connection_that_ends_by_itself_is_not_closed_again(autojump_clock):
    async with trio.open_nursery() as nursery:
        connection = Connection(nursery)
        await connection.be_idle()
        connection.timer.end()
        await connection.be_idle()
    assert connection.closed_at is None
    assert connection.spawned == 1
