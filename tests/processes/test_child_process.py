"""Real child processes, and what comes through the channel to them that is no message."""

import os
import signal
import subprocess
import sys
import threading
from contextlib import ExitStack, suppress

import msgspec
import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from tests.scarcity import no_more_files, no_more_threads, open_files
from tests.server.programs.child import Job, Said
from tests.server.server_process import until
from trio_pool_serve.errors import UnsendableError
from trio_pool_serve.processes.child_process import (
    EXIT_TIMEOUT_S,
    BlockingChild,
    ChildEnd,
    RestartBackoff,
    keep_alive,
    open_child,
    open_process_nursery,
)
from trio_pool_serve.server.api_workers import Drain, _send

CHILD = "tests.server.programs.child"

GARBAGE = b"\xc1" * 100


async def test_a_child_sends_a_message_and_exits_with_its_parent():
    async with open_child(CHILD, Job(b""), Said) as child:
        assert await child.status() == Said("hello")
        await trio.aclose_forcefully(child.channel.stream)
        await child.process.wait()
        assert child.end == "exited with status 7"


async def test_a_child_has_ended_even_if_a_process_that_it_forked_lives_on():
    async with open_child(CHILD, Job(b"", forks=True), Said) as child:
        try:
            assert await child.status() == Said("hello")
            child.process.kill()
            with trio.fail_after(60):
                assert await child.status() is None
            assert child.end == "was ended by signal 9"
        finally:
            os.killpg(child.process.pid, signal.SIGKILL)


@pytest.mark.parametrize("scarcity", [no_more_files, no_more_threads])
async def test_a_child_that_cannot_be_started_is_started_once_it_can(scarcity, caplog):
    said: list[Said | None] = []
    held = threading.Event()

    async def start() -> None:
        async with open_child(CHILD, Job(b""), Said) as child:
            said.append(await child.status())

    async def occupy_idle_thread() -> None:
        with suppress(RuntimeError):
            await trio.to_thread.run_sync(held.wait, limiter=trio.CapacityLimiter(1))

    files = open_files()
    async with trio.open_nursery() as nursery:
        with scarcity(), ExitStack() as at_last:
            at_last.callback(held.set)
            for _ in range(8):
                nursery.start_soon(occupy_idle_thread)
            await wait_all_tasks_blocked()
            nursery.start_soon(start)
            await until(lambda: caplog.text.count("cannot be started") >= 2)
            assert said == []
        assert open_files() == files, "what was opened for it is closed"
    assert said == [Said("hello")]


async def test_a_child_that_sends_an_invalid_message_is_ended_and_may_be_told_to_drain():
    async with open_child(CHILD, Job(GARBAGE), Said) as child:
        assert await child.status() is None
        await _send(Drain(), child)  # its channel is closed already
        assert child.end == "exited with status 7"


@pytest.mark.parametrize(("answer", "expected"), [(b"", Said("hello")), (GARBAGE, None)], ids=["valid", "invalid"])
def test_a_thread_gets_the_messages_of_a_child_which_exits_with_its_channel(answer: bytes, expected: Said | None):
    child = BlockingChild(CHILD, msgspec.msgpack.Decoder(Said))
    child.send(Job(answer))
    assert child.status() == expected
    child.leave(EXIT_TIMEOUT_S)
    assert child.end == "exited with status 7"
    child.send(Job(answer))  # does nothing


def test_a_thread_kills_a_child_that_does_not_exit():
    child = BlockingChild(CHILD, msgspec.msgpack.Decoder(Said))
    child.process.send_signal(signal.SIGSTOP)
    child.leave(0)
    assert child.end == "was ended by signal 9"


async def test_a_child_that_receives_an_invalid_message_exits():
    async with open_child(CHILD, Job(b""), Said) as child:
        assert await child.status() == Said("hello")
        await child.channel.stream.send_all(GARBAGE)
        await child.process.wait()
        assert child.end == "exited with status 7"


async def test_a_child_that_is_silent_is_killed_and_time_in_which_the_parent_was_stopped_does_not_count(mock_clock):
    async with open_child(CHILD, Job(b""), Said) as child, trio.open_nursery() as nursery:
        assert await child.status(6.0) == Said("hello")
        child.process.send_signal(signal.SIGSTOP)  # or it would leave with status 7 when it is killed
        nursery.start_soon(child.status, 6.0)
        await wait_all_tasks_blocked()
        for seconds in (1000, 1, 1, 1, 1):
            mock_clock.jump(seconds)
            await wait_all_tasks_blocked()
        assert child.process.poll() is None
        mock_clock.jump(1)
        await child.process.wait()
        assert child.end == "was ended by signal 9"


async def test_a_job_that_cannot_be_sent_is_the_parents_error_and_leaves_no_child():
    with pytest.raises(UnsendableError):
        async with open_child(CHILD, Job("\ud800"), Said) as child:
            pytest.fail(f"{child} has begun")


async def test_a_child_is_restarted_forever_without_a_limit(autojump_clock):
    lived = 0

    async def live() -> ChildEnd:
        nonlocal lived
        lived += 1
        return ChildEnd("ended by signal 9", 1.0)

    with trio.move_on_after(3600):
        await keep_alive("a child", live)
    assert lived > 100


NEVER_ENDS = """
import trio
from trio_pool_serve.processes import child_process

child_process.UNWIND_S = 1

async def lose_the_wake_up():
    with trio.CancelScope(shield=True):
        await trio.sleep_forever()

async def fail():
    raise MemoryError

async def main():
    async with child_process.open_process_nursery() as nursery:
        nursery.start_soon(lose_the_wake_up)
        nursery.start_soon(fail)

trio.run(main)
"""


def test_a_process_in_which_a_task_never_ends_after_an_error_is_ended():
    """As without memory, when what should wake a task is lost."""
    ended = subprocess.run(
        [sys.executable, "-c", NEVER_ENDS], timeout=60, check=False, stderr=subprocess.PIPE, text=True
    )
    assert ended.returncode == -signal.SIGALRM
    assert "an error ends this process" in ended.stderr


async def test_a_process_that_ends_in_time_has_no_alarm():
    async with open_process_nursery() as nursery:
        nursery.cancel_scope.cancel()
    assert signal.alarm(0) == 0


def test_pauses_follow_each_other_the_last_repeats_and_a_run_that_was_stable_begins_them_again():
    backoff = RestartBackoff((0.0, 1.0, 5.0), stable_after_s=60)
    assert [backoff.next_pause_s(ran_s) for ran_s in (1, 1, 60, 1, 61, 1)] == [0.0, 1.0, 5.0, 5.0, 0.0, 1.0]
