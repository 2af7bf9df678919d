"""Callables in processes: what comes back, who waits, what ends them."""

import os
import signal
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import psutil
import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from tests.process_gate import Gate
from tests.scarcity import no_more_files
from tests.server.server_process import until
from trio_pool_serve.errors import (
    ContextLengthError,
    InvalidRequestError,
    OverloadedError,
    StartFailedError,
    UnavailableError,
    WorkerDiedError,
    WorkerTooSlowError,
)
from trio_pool_serve.processes.worker_processes import WorkerProcesses, WorkerStatistics


@asynccontextmanager
async def kept(workers: WorkerProcesses) -> AsyncIterator[WorkerProcesses]:
    async with trio.open_nursery() as nursery:
        await nursery.start(workers.run)
        yield workers
        nursery.cancel_scope.cancel(reason="the test is over")


@pytest.fixture
async def one() -> AsyncIterator[WorkerProcesses]:
    async with kept(WorkerProcesses(1)) as workers:
        yield workers


@pytest.fixture
def gate(tmp_path: Path) -> Gate:
    return Gate.make(tmp_path / "gate")


def refuse(error: Exception) -> None:
    raise error


def refuse_for_a_while() -> None:
    raise OverloadedError("busy", retry_after_s=2.0)


def refuse_with_a_lock() -> None:
    raise ValueError(threading.Lock())


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def for_ever() -> None:
    while True:
        pass


def children() -> set[int]:
    """The processes that work; not the one that multiprocessing keeps to clean up behind them."""
    family = psutil.Process().children()
    return {child.pid for child in family if "spawn_main" in "".join(child.cmdline())}


# -- what comes back ----------------------------------------------------------------------------------


async def test_a_callable_runs_in_another_process_which_is_kept(one):
    pid = await one.call(os.getpid)
    assert pid != os.getpid()
    assert await one.call(divmod, 7, 2) == (3, 1)
    assert await one.call(os.getpid) == pid
    assert children() == {pid}


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nothing sets it")
async def test_processes_yield_to_the_loop():
    own = os.getpriority(os.PRIO_PROCESS, 0)
    async with kept(WorkerProcesses(1, niceness=own + 3)) as workers:
        assert await workers.call(os.getpriority, os.PRIO_PROCESS, 0) >= own + 3


async def test_an_error_comes_back_with_its_fields(one):
    with pytest.raises(InvalidRequestError, match="wrong") as caught:
        await one.call(refuse, InvalidRequestError("wrong", param="input"))
    assert caught.value.param == "input"
    with pytest.raises(ContextLengthError) as caught:
        await one.call(refuse, ContextLengthError("long", param="documents"))
    assert caught.value.param == "documents"
    with pytest.raises(OverloadedError) as caught:
        await one.call(refuse_for_a_while)
    assert caught.value.retry_after_s == 2.0
    assert one.statistics() == WorkerStatistics(capacity=1, borrowed=0, waiting=0, killed=0)


async def test_a_process_that_cannot_be_started_fails_its_call_alone(one):
    with no_more_files(), pytest.raises(StartFailedError):
        await one.call(os.getpid)
    assert await one.call(os.getpid) != os.getpid()


async def test_unpicklable_objects_raise_in_both_directions(one):
    with pytest.raises(TypeError, match="pickle"):
        await one.call(id, threading.Lock())
    with pytest.raises(TypeError, match="pickle"):
        await one.call(threading.Lock)
    with pytest.raises(TypeError, match="pickle"):
        await one.call(refuse_with_a_lock)
    assert await one.call(abs, -1) == 1


async def test_no_more_run_at_once_than_there_are_processes(tmp_path: Path):
    gates = [Gate.make(tmp_path / f"{n}") for n in range(3)]
    pids = []

    async def ask(workers: WorkerProcesses, gate: Gate) -> None:
        pids.append(await workers.call(gate))

    async with kept(WorkerProcesses(2)) as workers, trio.open_nursery() as nursery:
        for gate in gates[:2]:
            nursery.start_soon(ask, workers, gate)
        for gate in gates[:2]:
            await gate.wait_entered()
        nursery.start_soon(ask, workers, gates[2])
        await wait_all_tasks_blocked()
        assert workers.statistics() == WorkerStatistics(capacity=2, borrowed=2, waiting=1, killed=0)
        assert repr(workers) == "<WorkerProcesses 2/2+1, 0 killed>"
        await gates[0].let_go()
        assert await gates[2].wait_entered() in pids, "the process that became free was taken"
        for gate in gates[1:]:
            await gate.let_go()
    assert len(set(pids)) == 2


async def test_clients_take_turns_for_processes(gate):
    order = []

    async def ask(workers: WorkerProcesses, client: int) -> None:
        await workers.call(bool, client=client)
        order.append(client)

    async with kept(WorkerProcesses(1)) as workers, trio.open_nursery() as nursery:
        nursery.start_soon(partial(workers.call, gate, client=1))
        await gate.wait_entered()
        for client in (1, 1, 1, 1, 1, 2, 3):
            nursery.start_soon(ask, workers, client)
            await wait_all_tasks_blocked()
        assert workers.statistics() == WorkerStatistics(capacity=1, borrowed=1, waiting=7, killed=0)
        await gate.let_go()
    assert order == [1, 2, 1, 3, 1, 1, 1], "the first was ready"


# -- what ends them -----------------------------------------------------------------------------------


async def test_a_call_past_its_time_limit_is_killed_and_the_next_one_works(one):
    pid = await one.call(os.getpid)
    with pytest.raises(WorkerTooSlowError, match=r"longer than 0\.1 s"):
        await one.call(for_ever, timeout_s=0.1)
    assert not psutil.pid_exists(pid)
    assert await one.call(os.getpid, timeout_s=60) != pid
    assert one.statistics() == WorkerStatistics(capacity=1, borrowed=0, waiting=0, killed=1)


async def test_no_time_limit_includes_the_start_of_a_process(gate):
    """The limit is far shorter than any process takes to start."""
    async with kept(WorkerProcesses(1, prepare=gate)) as workers, trio.open_nursery() as nursery:
        nursery.start_soon(partial(workers.call, bool, timeout_s=0.05))
        await gate.wait_entered()
        await gate.let_go()
    assert workers.statistics().killed == 0


async def test_a_process_that_dies_fails_its_call_alone(one):
    with pytest.raises(WorkerDiedError, match="process died"):
        await one.call(die)
    assert await one.call(abs, -1) == 1
    assert one.statistics() == WorkerStatistics(capacity=1, borrowed=0, waiting=0, killed=0)


async def test_a_process_that_died_idle_fails_no_call(one):
    pid = await one.call(os.getpid)
    os.kill(pid, signal.SIGKILL)
    await until(lambda: psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    assert await one.call(os.getpid) != pid


async def test_a_process_that_cannot_be_prepared_fails_the_call(capfd):
    async with kept(WorkerProcesses(2, prepare=partial(refuse, ValueError("no such tokenizer")))) as workers:
        with pytest.raises(WorkerDiedError):
            await workers.call(bool)
    assert "no such tokenizer" in capfd.readouterr().err


async def test_a_signal_for_the_whole_group_leaves_them_alone(one):
    """SIGINT, as a terminal sends it, and SIGTERM, as a service manager does: only the server ends them."""
    pid = await one.call(os.getpid)
    for number in (signal.SIGTERM, signal.SIGINT):
        os.kill(pid, number)
    assert await one.call(os.getpid) == pid


# -- cancellation -------------------------------------------------------------------------------------


async def test_cancelled_calls_leave_at_once_and_work_that_has_begun_keeps_its_process_until_it_is_done(one, gate):
    with trio.CancelScope() as scope:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(one.call, gate)
            pid = await gate.wait_entered()
            nursery.start_soon(one.call, die)
            await wait_all_tasks_blocked()
            assert one.statistics().waiting == 1
            scope.cancel()
    assert scope.cancelled_caught
    assert one.statistics() == WorkerStatistics(capacity=1, borrowed=1, waiting=0, killed=0)
    await gate.let_go()
    assert await one.call(os.getpid) == pid, "it was not killed, and did nothing else"
    assert one.statistics() == WorkerStatistics(capacity=1, borrowed=0, waiting=0, killed=0)


async def test_work_of_a_cancelled_call_is_killed_for_its_time_limit_all_the_same(one):
    with trio.CancelScope() as scope:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(one.call, for_ever, timeout_s=1.0))
            await wait_all_tasks_blocked()
            scope.cancel()
    assert await one.call(abs, -1) == 1
    assert one.statistics() == WorkerStatistics(capacity=1, borrowed=0, waiting=0, killed=1)


# -- the end ------------------------------------------------------------------------------------------


async def test_at_the_end_work_is_killed_and_its_callers_told(gate):
    workers, told = WorkerProcesses(1), []

    async def ask() -> None:
        with pytest.raises(UnavailableError) as caught:
            await workers.call(gate)
        told.append(str(caught.value))

    async with trio.open_nursery() as clients, trio.open_nursery() as nursery:
        await nursery.start(workers.run)
        clients.start_soon(ask)
        pid = await gate.wait_entered()
        clients.start_soon(ask)
        await wait_all_tasks_blocked()
        nursery.cancel_scope.cancel(reason="the server leaves")
    assert told == ["The server is shutting down."] * 2
    assert not psutil.pid_exists(pid)
    assert workers.statistics() == WorkerStatistics(capacity=1, borrowed=0, waiting=0, killed=0)


async def test_calls_before_and_after_the_run_are_refused():
    workers = WorkerProcesses(1)
    for _ in range(2):
        with pytest.raises(UnavailableError, match="not running"):
            await workers.call(bool)
        async with kept(workers):
            assert await workers.call(abs, -1) == 1


# -- without processes ----------------------------------------------------------------------------------


async def test_without_processes_everything_runs_on_the_loop():
    workers = WorkerProcesses(1, in_processes=False)
    assert await workers.call(os.getpid) == os.getpid()
    assert children() == set()
    with trio.CancelScope() as scope:
        scope.cancel()
        await workers.call(die)
    assert scope.cancelled_caught
