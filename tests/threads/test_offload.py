"""Blocking callables on limiters of their own."""

import os
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import get_args

import pytest
import trio
from attrs import define, field
from trio.testing import wait_all_tasks_blocked

from tests.scarcity import no_more_threads
from tests.server.server_process import until
from trio_pool_serve.errors import StartFailedError
from trio_pool_serve.threads.client_turns import LimiterStatistics
from trio_pool_serve.threads.offload import LimiterName, Offload

pytestmark = pytest.mark.unit


@define(eq=False)
class Blocker:
    """A callable that occupies a thread until it is let go."""

    entered: threading.Event = field(factory=threading.Event, init=False)
    let_go: threading.Event = field(factory=threading.Event, init=False)
    calls: int = field(default=0, init=False)

    def __call__(self) -> str:
        self.calls += 1
        self.entered.set()
        assert self.let_go.wait(60)
        return "done"


async def in_thread(wait: Callable[[], object]) -> None:
    await trio.to_thread.run_sync(wait, limiter=trio.CapacityLimiter(1))


@asynccontextmanager
async def occupied(offload: Offload, **options) -> AsyncIterator[tuple[trio.Nursery, Blocker]]:
    """A renderer thread is busy in the block, until the ``Blocker`` is let go, or the block ends."""
    blocker = Blocker()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(partial(offload.run, "render", blocker, **options))
        await in_thread(blocker.entered.wait)
        yield nursery, blocker
        blocker.let_go.set()


async def test_kinds_do_not_wait_for_each_other():
    offload = Offload()
    async with occupied(offload):
        for kind in ("postprocess", "load", "launch", "copy"):
            assert await offload.run(kind, lambda: "free") == "free"
        assert offload.statistics()["render"] == LimiterStatistics(capacity=1, borrowed=1, waiting=0)


def test_each_kind_has_the_capacity_it_was_given():
    offload = Offload(render=2, media=6, postprocess=3, launch=4, copy=5, idle_launches=7)
    given = {"render": 2, "media": 6 + 1, "postprocess": 3, "launch": 4, "background": 7, "copy": 5}
    others = {"download": 4, "load": 1, "compile": 1, "ahead": 1, "cluster": 1, "files": 2}
    assert {kind: limiter.capacity for kind, limiter in offload.statistics().items()} == given | others


# -- turns --------------------------------------------------------------------------------------------


async def test_clients_take_turns_for_render_threads_with_bodies_and_prompts_alike():
    offload, order = Offload(render=1), []
    async with occupied(offload, client=1) as (nursery, _):
        for number in range(10):
            if number % 2:
                nursery.start_soon(partial(offload.run, "render", partial(order.append, 1), client=1))
            else:
                nursery.start_soon(offload.decode, 1, partial(order.append, 1))
            await wait_all_tasks_blocked()
        nursery.start_soon(offload.decode, 2, partial(order.append, 2))
        nursery.start_soon(partial(offload.run, "render", partial(order.append, 3), client=3))
        await wait_all_tasks_blocked()
        assert repr(offload).startswith("<Offload render 1/1+12, media 0/3+0, ")
    assert order.count(1) == 10
    assert {2, 3} <= {*order[:4]}, "behind the one that was ready, and one more in turn"


async def test_prompts_of_a_client_do_not_wait_for_all_of_its_bodies():
    """Else each request would wait twice for as long as those before it: to be decoded, and to be tokenised."""
    offload, order = Offload(render=1), []
    async with occupied(offload, client=1) as (nursery, _):
        for _ in range(10):
            nursery.start_soon(offload.decode, 1, partial(order.append, "body"))
        await wait_all_tasks_blocked()
        nursery.start_soon(partial(offload.run, "render", partial(order.append, "prompt"), client=1))
        await wait_all_tasks_blocked()
    assert order.index("prompt") <= 2


# -- observing ----------------------------------------------------------------------------------------


@define(eq=False)
class Hops:
    """What was observed, and where."""

    seen: list[tuple[str, float, float]] = field(factory=list)
    threads: set[int] = field(factory=set)

    def __call__(self, kind: str, wait_s: float, run_s: float) -> None:
        self.seen.append((kind, wait_s, run_s))
        self.threads.add(threading.get_ident())


@pytest.mark.parametrize("in_threads", [True, False])
async def test_each_hop_is_observed_once_on_the_loop_with_its_wait_and_its_run(in_threads):
    hops = Hops()
    offload = Offload(observe=hops, in_threads=in_threads)
    await offload.run("render", lambda: sum(range(1000)))
    with pytest.raises(ZeroDivisionError):
        await offload.run("copy", lambda: 1 // 0)
    assert [kind for kind, _, _ in hops.seen] == ["render", "copy"]
    assert all(wait_s >= 0 and run_s >= 0 for _, wait_s, run_s in hops.seen)
    assert hops.threads == {threading.get_ident()}


async def test_the_wait_for_a_thread_is_told_apart_from_the_run():
    hops = Hops()
    offload = Offload(observe=hops)
    async with occupied(offload) as (nursery, _):
        nursery.start_soon(offload.run, "render", lambda: None)
        await wait_all_tasks_blocked()
        queued = time.perf_counter()
        await wait_all_tasks_blocked()
        let_go = time.perf_counter()
    (_, _, blocker_run), (_, second_wait, _) = hops.seen
    assert blocker_run >= let_go - queued
    assert second_wait >= let_go - queued


# -- cancellation -------------------------------------------------------------------------------------


async def test_a_cancelled_call_that_waits_for_a_thread_leaves_at_once_unrun_and_unobserved():
    hops, never = Hops(), Blocker()
    offload = Offload(observe=hops)
    async with occupied(offload):
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as waiting:
                waiting.start_soon(offload.run, "render", never)
                await wait_all_tasks_blocked()
                scope.cancel()
        assert scope.cancelled_caught
        assert offload.statistics()["render"] == LimiterStatistics(capacity=1, borrowed=1, waiting=0)
    assert never.calls == 0
    assert len(hops.seen) == 1


@pytest.mark.parametrize("checks", [False, True])
async def test_a_running_callable_is_waited_for_and_may_check_whether_it_is_cancelled(checks):
    offload, blocker, results = Offload(), Blocker(), []

    def work() -> str:
        done = blocker()
        if checks:
            trio.from_thread.check_cancelled()
        return done

    async def ask() -> None:
        results.append(await offload.run("render", work))

    with trio.CancelScope() as scope:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            await in_thread(blocker.entered.wait)
            scope.cancel()
            with trio.CancelScope(shield=True):
                await wait_all_tasks_blocked()
            assert offload.statistics()["render"].borrowed == 1
            blocker.let_go.set()
    assert results == ([] if checks else ["done"])
    assert offload.statistics()["render"].borrowed == 0


async def test_an_abandoned_callable_keeps_its_token_until_it_ends():
    hops, blocker = Hops(), Blocker()
    offload = Offload(observe=hops)
    with trio.CancelScope() as scope:
        async with trio.open_nursery() as nursery:

            @nursery.start_soon
            async def ask() -> None:
                await offload.run("launch", blocker, abandon_on_cancel=True)

            await in_thread(blocker.entered.wait)
            scope.cancel()
    assert scope.cancelled_caught
    assert not blocker.let_go.is_set(), "it was not waited for"
    assert offload.statistics()["launch"].borrowed == 1
    blocker.let_go.set()
    assert await offload.run("launch", lambda: "the next") == "the next"
    assert offload.statistics()["launch"].borrowed == 0


async def launch_at_once(offload: Offload, count: int) -> set[int]:
    """Return the threads of ``count`` callables that run at the same time."""
    together = threading.Barrier(count)
    threads: set[int] = set()

    def meet() -> None:
        together.wait(60)
        threads.add(threading.get_ident())

    async with trio.open_nursery() as nursery:
        for _ in range(count):
            nursery.start_soon(offload.run, "launch", meet)
    return threads


async def test_launches_keep_their_threads_and_a_lone_one_has_always_the_same():
    offload = Offload(launch=2)
    pair = await launch_at_once(offload, 2)
    assert len(pair) == 2
    assert await launch_at_once(offload, 2) == pair
    lone = {await offload.run("launch", threading.get_ident) for _ in range(5)}
    assert len(lone) == 1
    assert lone < pair


async def test_closing_ends_idle_launch_threads_at_once_and_busy_ones_after_their_callable():
    offload, blocker = Offload(launch=2), Blocker()
    before = await launch_at_once(offload, 2)
    threads = [thread for thread in threading.enumerate() if thread.ident in before]
    async with trio.open_nursery() as nursery:
        nursery.start_soon(offload.run, "launch", blocker)
        await in_thread(blocker.entered.wait)
        offload.close()
        assert await offload.run("launch", threading.current_thread) not in threads
        assert sum(thread.is_alive() for thread in threads) >= 1, "one is busy"
        blocker.let_go.set()
    for thread in threads:
        await in_thread(thread.join)


async def test_a_model_is_loaded_in_a_thread_that_ends_with_the_loading():
    thread = await Offload().run("load", threading.current_thread)
    await in_thread(thread.join)
    assert thread.daemon, "a process that is to exit does not wait for it"


# -- without threads ----------------------------------------------------------------------------------


async def test_a_file_that_cannot_be_read_again_holds_up_only_a_later_reading_of_the_same(monkeypatch, caplog):
    """The reading that does not end is given up after ``RELOAD_S``, and at once if it is cancelled."""
    offload, ended = Offload(), threading.Event()
    with monkeypatch.context() as short:
        short.setattr("trio_pool_serve.threads.offload.RELOAD_S", 0.1)
        assert await offload.reload("certificate", ended.wait) is None
    kept = "reloading the certificate failed; the previous ones stay in use: they could not be read within 0.1 s."
    assert kept in caplog.messages
    assert await offload.reload("keys", lambda: "new keys") == "new keys"
    with trio.CancelScope() as cancelled:
        cancelled.cancel()
        await offload.reload("certificate", ended.wait)
    assert cancelled.cancelled_caught
    async with trio.open_nursery() as nursery:
        nursery.start_soon(offload.reload, "certificate", ended.is_set)
        await wait_all_tasks_blocked()
        ended.set()
    assert caplog.text.count("reloading the certificate failed") == 1


async def test_only_regular_files_are_read_again(tmp_path, caplog):
    """A pipe without a writer would hold a thread for ever."""
    pipe = tmp_path / "keys"
    os.mkfifo(pipe)
    assert await Offload().reload("keys", pipe.read_bytes, pipe) is None
    assert f"{pipe} is not a regular file" in caplog.text


async def test_without_threads_everything_runs_on_the_loop_and_a_cancelled_callable_never_starts():
    offload, never = Offload(in_threads=False), Blocker()
    assert await offload.run("render", threading.get_ident) == threading.get_ident()
    with trio.CancelScope() as scope:
        scope.cancel()
        await offload.run("render", never)
    assert scope.cancelled_caught
    assert never.calls == 0


def niceness() -> int:
    return os.getpriority(os.PRIO_PROCESS, 0)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere niceness belongs to processes")
async def test_threads_yield_to_the_loop_and_callables_on_the_loop_do_not():
    own = niceness()
    computing_elsewhere = Offload(niceness=own + 3).run("launch", niceness, lowers_priority=False)
    assert await computing_elsewhere == own, "it computes in threads of its own"
    for kind in get_args(LimiterName):
        # A thread that did other work before may be nicer still.
        assert await Offload(niceness=own + 3).run(kind, niceness) >= own + 3
        assert await Offload(niceness=own + 3, in_threads=False).run(kind, niceness) == own
    assert niceness() == own


async def test_without_a_thread_a_request_fails_and_holds_nothing():
    """Threads that are idle take some of the calls."""
    offload, held, failed = Offload(render=64), threading.Event(), 0

    async def call() -> None:
        nonlocal failed
        try:
            await offload.run("render", held.wait)
        except StartFailedError:
            failed += 1

    async with trio.open_nursery() as nursery:
        with no_more_threads():
            for _ in range(64):
                nursery.start_soon(call)
            await wait_all_tasks_blocked(0.1)
        assert failed > 0
        assert offload.statistics()["render"].borrowed == 64 - failed
        held.set()
    assert await offload.run("render", lambda: "done") == "done"


@pytest.mark.parametrize("kind", ["launch", "load"])
async def test_without_a_thread_work_of_the_server_waits_for_one(kind, caplog):
    offload, done = Offload(), []

    async def call() -> None:
        done.append(await offload.run(kind, lambda: "done"))

    async with trio.open_nursery() as nursery:
        with no_more_threads():
            nursery.start_soon(call)
            await until(lambda: f"no thread for {kind}" in caplog.text)
            assert done == []
            assert offload.statistics()[kind].borrowed == 0
    assert done == ["done"]


async def test_an_error_of_the_callable_is_not_taken_for_a_thread_that_does_not_start():
    def raises() -> None:
        raise RuntimeError("its own")

    for kind in ("render", "files"):
        with pytest.raises(RuntimeError, match="its own"):
            await Offload().run(kind, raises)
