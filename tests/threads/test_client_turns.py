"""Clients that take turns for threads, and the estimate of how long that takes."""

from itertools import pairwise

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from trio_pool_serve.threads.client_turns import Backlog, ClientTurns

pytestmark = pytest.mark.unit


def is_unused(turns: ClientTurns) -> bool:
    return not turns.waiting and not turns._waiting and not turns._working


async def work(turns: ClientTurns, client: int, order: list[int], free: trio.Semaphore) -> None:
    async with turns.turn(client):
        order.append(client)
        await free.acquire()


async def test_clients_take_turns_however_much_one_has_waiting():
    turns, order, free = ClientTurns(1, 1), [], trio.Semaphore(0)
    async with trio.open_nursery() as nursery:
        for client in (1, 1, 1, 1, 1, 2, 3, 3):
            nursery.start_soon(work, turns, client, order, free)
            await wait_all_tasks_blocked()
        assert order == [1]
        assert turns.waiting == 7
        for _ in range(8):
            free.release()
    assert order == [1, 1, 2, 3, 1, 3, 1, 1]
    assert is_unused(turns)


@pytest.mark.parametrize("slots", [1, 3])
async def test_no_more_than_the_slots_work_at_a_time_and_all_of_them_do(slots):
    turns, working, most = ClientTurns(slots, slots), 0, []

    async def count(client: int) -> None:
        nonlocal working
        async with turns.turn(client):
            working += 1
            most.append(working)
            await trio.lowlevel.checkpoint()
            working -= 1

    async with trio.open_nursery() as nursery:
        for number in range(20):
            nursery.start_soon(count, number % 4)
    assert max(most) == slots
    assert len(most) == 20


async def test_a_cancelled_wait_takes_no_turn_from_others():
    turns, order, free = ClientTurns(1, 1), [], trio.Semaphore(0)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(work, turns, 1, order, free)
        await wait_all_tasks_blocked()
        with trio.CancelScope() as leaving:
            async with trio.open_nursery() as others:
                others.start_soon(work, turns, 2, order, free)
                others.start_soon(work, turns, 2, order, free)
                await wait_all_tasks_blocked()
                leaving.cancel()
        assert turns.waiting == 0
        nursery.start_soon(work, turns, 3, order, free)
        for _ in range(2):
            free.release()
    assert order == [1, 3]
    assert is_unused(turns)


async def test_a_turn_that_is_granted_as_its_task_is_cancelled_goes_to_the_next():
    turns, order, free, go_on = ClientTurns(1, 1), [], trio.Semaphore(1), trio.Event()
    cancelled = trio.CancelScope()

    async def cancel_and_pass_on() -> None:
        async with turns.turn(1):
            await go_on.wait()
            cancelled.cancel()  # its task runs, and is told so, only after the turn has been passed on to it

    async def wait_cancelled() -> None:
        with cancelled:
            await work(turns, 2, order, free)

    async with trio.open_nursery() as nursery:
        for task in (cancel_and_pass_on, wait_cancelled):
            nursery.start_soon(task)
            await wait_all_tasks_blocked()
        nursery.start_soon(work, turns, 3, order, free)
        await wait_all_tasks_blocked()
        go_on.set()
    assert order == [3]
    assert is_unused(turns)


async def test_a_client_whose_tasks_take_long_leaves_slots_to_others():
    """Images that are fetched from a server that does not answer, for example."""
    turns, order, never, free = ClientTurns(4, 2), [], trio.Semaphore(0), trio.Semaphore(100)
    async with trio.open_nursery() as nursery:
        for _ in range(10):
            nursery.start_soon(work, turns, 1, order, never)
        await wait_all_tasks_blocked()
        assert order == [1, 1]
        for _ in range(10):
            nursery.start_soon(work, turns, 2, order, free)
        await wait_all_tasks_blocked()
        assert order == [1, 1, *[2] * 10]
        assert turns.waiting == 8
        for _ in range(10):
            never.release()
    assert order.count(1) == 10
    assert is_unused(turns)


async def test_work_that_raises_passes_its_turn_on():
    turns = ClientTurns(1, 1)
    for _ in range(3):
        with pytest.raises(ValueError, match="wrong"):
            async with turns.turn(1):
                raise ValueError("wrong")
    assert is_unused(turns)


# -- tasks with numbers: the batches of owners ------------------------------------------------------------


Z, A, B, C = range(4)


async def test_clients_take_turns_and_each_has_its_own_tasks_in_the_order_of_their_numbers():
    turns, order = ClientTurns(1, 1), []

    async def work_numbered(client: int, number: int) -> None:
        async with turns.turn(client, number):
            order.append((client, number))
            await wait_all_tasks_blocked()

    async with trio.open_nursery() as nursery, turns.turn(Z, 0):
        for client, number in [(A, 3), (A, 1), (A, 2), (B, 9), (B, 4), (C, 5)]:
            nursery.start_soon(work_numbered, client, number)
            await wait_all_tasks_blocked()
        assert turns.step_back(Z)
    assert order == [(A, 1), (B, 4), (C, 5), (A, 2), (B, 9), (A, 3)]
    assert not turns.step_back(Z)
    assert is_unused(turns)


async def test_a_task_that_steps_back_for_others_works_on_before_later_tasks_of_its_client():
    """Task 2 of A waits longer than B, but A worked last; and task 1 is not complete."""
    turns, order = ClientTurns(1, 1), []

    async def work_in_parts(client: int, number: int, parts: int) -> None:
        while parts:
            async with turns.turn(client, number):
                is_wanted = False
                while parts and not is_wanted:
                    parts -= 1
                    order.append((client, number))
                    await wait_all_tasks_blocked()
                    is_wanted = turns.step_back(client)
            await trio.lowlevel.checkpoint()

    async with trio.open_nursery() as nursery:
        for task in [(A, 1, 5), (A, 2, 2), (B, 3, 2)]:
            nursery.start_soon(work_in_parts, *task)
            await wait_all_tasks_blocked()
    assert order == [*[(A, 1)] * 3, (B, 3), (A, 1), (B, 3), (A, 1), (A, 2), (A, 2)]


async def test_a_turn_that_is_no_longer_waited_for_is_the_next_one_s():
    turns = ClientTurns(1, 1)
    scopes = [trio.CancelScope() for _ in range(3)]
    worked = []

    async def work_numbered(number: int) -> None:
        with scopes[number]:
            async with turns.turn(A, number):
                worked.append(number)

    async with trio.open_nursery() as nursery, turns.turn(Z, 9):
        for number in range(3):
            nursery.start_soon(work_numbered, number)
        await wait_all_tasks_blocked()
        scopes[0].cancel()
        await wait_all_tasks_blocked()
    assert worked == [1, 2]
    async with turns.turn(B, 0):
        pass


@pytest.mark.parametrize("others", [[B], []])
async def test_a_turn_given_to_a_task_that_is_just_cancelled_is_the_next_one_s(others):
    """The task is cancelled and given the turn in the same round of the event loop."""
    turns, cancelled, order = ClientTurns(1, 1), trio.CancelScope(), []

    async def work_in(client: int, scope: trio.CancelScope) -> None:
        with scope:
            async with turns.turn(client, 1):
                order.append(client)

    with trio.fail_after(5):
        async with trio.open_nursery() as nursery, turns.turn(Z, 0):
            nursery.start_soon(work_in, A, cancelled)
            await wait_all_tasks_blocked()
            for other in others:
                nursery.start_soon(work_in, other, trio.CancelScope())
            await wait_all_tasks_blocked()
            cancelled.cancel()
        async with turns.turn(C, 2):
            order.append(C)
    assert order == [*others, C]
    assert is_unused(turns)


# -- how long it takes ----------------------------------------------------------------------------------


def backlog_of(seconds: float, *waiting: int) -> Backlog:
    """Return a backlog in which an item takes so long, with so many waiting of each client."""
    now = 0.0
    backlog = Backlog(lambda: now)
    backlog.add(99, 20)
    for _ in range(10):
        now += seconds
        backlog.note_done(99)
    backlog.withdraw(99, 10)
    assert not backlog.waiting
    for client, items in enumerate(waiting):
        backlog.add(client, items)
    return backlog


def test_how_long_items_take_is_measured_while_several_wait():
    now = 0.0
    backlog = Backlog(lambda: now)
    backlog.add(1, 2)
    for _ in range(2):  # one thread may take a while when there is nothing to share it with
        now += 100.0
        backlog.note_done(1)
    assert backlog.total_s == 0
    backlog.add(1, 1000)
    for seconds in (5.0, *(0.02, 0.0, 0.0, 0.1, 0.0, 0.03) * 100):  # several at once, in the eyes of a busy loop
        now += seconds
        backlog.note_done(1)
    assert backlog.total == 399
    assert backlog.total_s == pytest.approx(399 * 0.025, rel=0.2)


def test_a_time_that_was_long_is_corrected_and_forgotten():
    """Images that could not be fetched kept others waiting; what is known of them must not refuse those that follow."""
    now = 0.0
    backlog = Backlog(lambda: now)
    backlog.add(1, 20)
    backlog.note_done(1)
    now += 30.0
    backlog.withdraw(1, 9)  # they failed
    backlog.note_done(1)
    assert backlog.total_s == 0
    now += 30.0
    backlog.note_done(1)
    assert backlog.total_s == pytest.approx(8 * 30.0)
    backlog.note_done(1)
    assert backlog.total_s == 0  # so few that nothing would correct it
    backlog.add(1, 100)
    assert backlog.total_s > 1000
    now += 9.9
    assert backlog.total_s > 1000
    now += 0.2
    assert backlog.total_s == 0


def test_a_client_waits_for_its_own_items_and_for_as_many_of_each_other():
    backlog = backlog_of(1.0, 100, 3, 0)
    assert backlog.wait_s(0) == pytest.approx(100 + 3)
    assert backlog.wait_s(1) == pytest.approx(3 + 4)
    assert backlog.wait_s(2) == pytest.approx(1 + 1)
    assert backlog.wait_s(2, items=10) == pytest.approx(10 + 3)
    assert all(backlog.wait_s(2, fewer) <= backlog.wait_s(2, more) for fewer, more in pairwise(range(1, 50)))
