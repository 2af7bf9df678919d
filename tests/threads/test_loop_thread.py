"""Event loops in threads, as their callers see them."""

import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager

import pytest
import trio
from attrs import define, field

from tests.conftest import until
from tests.server.server_process import ROOT
from trio_pool_serve.threads.dedicated_threads import DedicatedThreads
from trio_pool_serve.threads.loop_thread import LoopThread

NAME = "loop of a test"


@define(eq=False)
class Opened:
    """What a loop has open; it fails when ``fail`` is set."""

    fail: trio.Event = field(factory=trio.Event)
    closed: threading.Event = field(factory=threading.Event)

    @asynccontextmanager
    async def open(self) -> "AsyncIterator[Opened]":
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._run)
                yield self
                nursery.cancel_scope.cancel()
        except* OSError as group:
            raise group.exceptions[0] from None
        finally:
            self.closed.set()

    async def _run(self) -> None:
        await self.fail.wait()
        raise OSError("the device is gone")


@pytest.fixture
def loop() -> Iterator[LoopThread[Opened]]:
    loop = LoopThread(Opened().open, name=NAME)
    yield loop
    loop.close()
    wait_for_end_of(NAME)


def wait_for_end_of(name: str) -> None:
    for thread in threading.enumerate():
        if thread.name == name:
            thread.join(10)
    assert name not in [thread.name for thread in threading.enumerate()]


async def itself(opened: Opened) -> Opened:
    return opened


async def thread_of(_: Opened) -> str:
    return threading.current_thread().name


async def forever(_: Opened) -> None:
    await trio.sleep_forever()


async def end(opened: Opened) -> None:
    opened.fail.set()
    await trio.sleep_forever()


def test_calls_run_in_the_loop_with_the_entered_context(loop):
    assert loop.call(thread_of) == NAME
    assert loop.call(itself) is loop.call(itself)
    assert repr(loop) == "<LoopThread 0 calls>"


def test_calls_of_several_threads_run_at_the_same_time(loop):
    meet: list[float] = []

    async def wait(_: Opened) -> int:
        meet.append(trio.current_time())
        await until(lambda: len(meet) == 4)
        return len(meet)

    with ThreadPoolExecutor(4) as callers:
        assert list(callers.map(loop.call, [wait] * 4)) == [4] * 4


def test_an_error_of_a_call_is_that_callers_alone(loop):
    async def divide(_: Opened) -> float:
        return 1 / 0

    with pytest.raises(ZeroDivisionError):
        loop.call(divide)
    assert loop.call(thread_of) == NAME


def test_a_context_that_cannot_be_entered_raises_and_leaves_no_thread():
    @asynccontextmanager
    async def refuse() -> AsyncIterator[None]:
        raise OSError("no such device")
        yield

    with pytest.raises(OSError, match="no such device"):
        LoopThread(refuse, name="refused")
    wait_for_end_of("refused")


def test_a_failure_of_the_context_reaches_waiting_and_later_calls(loop):
    with pytest.raises(OSError, match="the device is gone"):
        loop.call(end)
    assert loop.has_ended
    assert repr(loop) == "<LoopThread ended>"
    with pytest.raises(OSError, match="the device is gone"):
        loop.call(thread_of)


def test_closing_cancels_calls_and_leaves_the_context(loop):
    opened = loop.call(itself)
    with ThreadPoolExecutor(1) as callers:
        waiting = callers.submit(loop.call, forever)
        while not loop._calls:
            pass
        loop.close()
        with pytest.raises(trio.RunFinishedError):
            waiting.result(10)
    assert opened.closed.is_set()
    with pytest.raises(trio.RunFinishedError):
        loop.call(thread_of)
    loop.close()  # again


def interrupt_a_call() -> None:
    """Interrupt a call by SIGINT. For a process of its own: libraries of other tests may handle that signal, too."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # processes started in the background ignore it
    loop = LoopThread(Opened().open, name=NAME)
    cancelled = threading.Event()
    caller = threading.get_ident()

    async def interrupt(_: Opened) -> None:
        try:
            signal.pthread_kill(caller, signal.SIGINT)
            await trio.sleep_forever()
        finally:
            cancelled.set()

    with pytest.raises(KeyboardInterrupt):
        loop.call(interrupt)
    assert cancelled.wait(10)
    assert loop.call(thread_of) == NAME
    loop.close()
    wait_for_end_of(NAME)


def test_a_caller_that_is_interrupted_cancels_its_task():
    program = f"from {__name__} import interrupt_a_call; interrupt_a_call()"
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, timeout=60)


def test_a_thread_whose_callable_outlives_the_loop_ends_with_it():
    let_go = threading.Event()

    async def abandon() -> None:
        with trio.move_on_after(0.01):
            await DedicatedThreads("outliving").run(lambda: let_go.wait(10), limiter=trio.CapacityLimiter(1))

    trio.run(abandon)
    let_go.set()
    wait_for_end_of("outliving")
