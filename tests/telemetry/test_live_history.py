"""Samples that viewers take together, one a second, and none without a viewer."""

import json
from collections.abc import Sequence

import pytest
import trio
import trio.testing

from trio_pool_serve.telemetry.live_samples import AT_ONCE, KEPT, LiveHistory
from trio_pool_serve.telemetry.metrics import Metrics
from trio_pool_serve.telemetry.snapshots import Snapshot, families_of

pytestmark = pytest.mark.unit


class Source:
    """Counts how often snapshots are taken."""

    def __init__(self) -> None:
        self.metrics = Metrics()
        self.taken = 0
        self.entered = trio.Event()
        self.blocks = False

    async def take(self) -> Sequence[Snapshot]:
        self.taken += 1
        self.entered.set()
        if self.blocks:
            await trio.sleep_forever()
        await trio.lowlevel.checkpoint()
        return [Snapshot(families_of(self.metrics.registry), {})]


@pytest.fixture
def source() -> Source:
    return Source()


@pytest.fixture
def history(source: Source) -> LiveHistory:
    return LiveHistory(source.take, lambda: "ready")


async def all_after(history: LiveHistory, number: int) -> list[int]:
    """The numbers of all samples that are kept, read piece by piece."""
    seen: list[int] = []
    while not seen or number < history.taken:
        number, found = await history.samples_after(number)
        assert len(found) <= AT_ONCE
        seen += numbers(found)
    return seen


def numbers(samples: list[bytes]) -> list[int]:
    return [json.loads(sample)["number"] for sample in samples]


async def view(history: LiveHistory, samples: int, seen: list[int]) -> None:
    number = 0
    while len(seen) < samples:
        number, found = await history.samples_after(number)
        seen += numbers(found)


async def test_five_viewers_share_one_sampler(history, source, autojump_clock):
    seen: list[list[int]] = [[] for _ in range(5)]
    async with trio.open_nursery() as nursery:
        for each in seen:
            nursery.start_soon(view, history, 4, each)
    assert seen == [[1, 2, 3, 4]] * 5
    assert source.taken == 4
    assert 3.0 <= trio.current_time() < 3.1  # the first at once, then one a second


async def test_without_a_viewer_nothing_is_sampled_and_no_task_is_left(history, source, autojump_clock):
    before = trio.lowlevel.current_statistics().tasks_living
    await view(history, 2, [])
    await trio.sleep(60)
    assert source.taken == 2
    assert trio.lowlevel.current_statistics().tasks_living == before


async def test_a_viewer_who_comes_later_gets_the_history_first(history, autojump_clock):
    await view(history, 3, [])
    assert await all_after(history, 0) == [1, 2, 3]
    assert await all_after(history, 2) == [3]
    assert await all_after(history, 3) == [4]


async def test_a_viewer_of_another_server_gets_all(history, autojump_clock):
    await view(history, 2, [])
    assert await all_after(history, 500) == [1, 2]


async def test_when_the_viewer_that_samples_leaves_another_does(history, source, autojump_clock):
    source.blocks = True
    seen: list[int] = []
    async with trio.open_nursery() as nursery:
        with trio.CancelScope() as leaving:
            nursery.start_soon(cancel_when_entered, source, leaving)
            await history.samples_after(0)
        assert leaving.cancelled_caught
        source.blocks = False
        nursery.start_soon(view, history, 2, seen)
    assert seen == [1, 2]


async def cancel_when_entered(source: Source, scope: trio.CancelScope) -> None:
    await source.entered.wait()
    scope.cancel()


async def test_viewers_that_wait_for_a_failed_sample_take_it_themselves(source, autojump_clock):
    async def fail_once() -> Sequence[Snapshot]:
        if not source.entered.is_set():
            source.entered.set()
            raise OSError("no snapshot")
        return await source.take()

    history = LiveHistory(fail_once, lambda: "ready")
    with pytest.raises(OSError, match="no snapshot"):
        await history.samples_after(0)
    assert await all_after(history, 0) == [1]


async def test_fifteen_minutes_are_kept(history, autojump_clock):
    await view(history, KEPT + 5, [])
    found = await all_after(history, 0)
    assert (len(found), found[0], found[-1]) == (KEPT, 6, KEPT + 5)
    assert KEPT == 15 * 60


async def test_rates_are_not_those_of_a_time_that_was_not_watched(history, source, autojump_clock):
    await view(history, 2, [])
    source.metrics.requests.inc(1000)
    await trio.sleep(600)
    _, (sample,) = await history.samples_after(2)
    assert "requests" not in json.loads(sample)
