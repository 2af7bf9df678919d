"""Prepared images: kept within a bound, prepared once."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy as np
import pytest
import trio
from attrs import define, field
from trio.testing import wait_all_tasks_blocked

from trio_pool_serve.errors import MediaError, UnavailableError
from trio_pool_serve.rendering.media.cache import CacheStatistics, Key, MediaCache
from trio_pool_serve.types import ImageFeatures

pytestmark = pytest.mark.unit


def key(name: str) -> Key:
    return name, b"digest"


@define(eq=False)
class Preparation:
    """What prepares an image, once it may go on."""

    nbytes: int = 10
    error: Exception | None = None
    goes_on: trio.Event = field(factory=trio.Event, init=False)
    begun: int = field(default=0, init=False)
    cancelled: int = field(default=0, init=False)

    async def __call__(self) -> ImageFeatures:
        self.begun += 1
        try:
            await self.goes_on.wait()
        except trio.Cancelled:
            self.cancelled += 1
            raise
        if self.error is not None:
            raise self.error
        return ImageFeatures({"pixel_values": np.zeros(self.nbytes, np.uint8)}, tokens=(1,))


def at_once(nbytes: int) -> Preparation:
    preparation = Preparation(nbytes)
    preparation.goes_on.set()
    return preparation


@asynccontextmanager
async def keeping(max_bytes: int = 100) -> AsyncIterator[MediaCache]:
    cache = MediaCache(max_bytes)
    async with trio.open_nursery() as nursery:
        await nursery.start(cache.run)
        yield cache
        assert cache.statistics().in_flight == 0
        nursery.cancel_scope.cancel()


async def test_what_is_kept_is_not_prepared_again():
    async with keeping() as cache:
        first = await cache.get(key("a"), at_once(10))
        again = Preparation()
        assert await cache.get(key("a"), again) is first
        assert again.begun == 0
        assert cache.statistics() == CacheStatistics(entries=1, bytes=10, hits=1, misses=1, in_flight=0)
        assert repr(cache) == "<MediaCache 1 in 10/100 bytes, 0 in flight>"
        for other in (("b", b"digest"), ("a", b"another")):  # of another processor, another image
            assert await cache.get(other, at_once(10)) is not first


async def test_what_was_asked_for_longest_ago_makes_room():
    async with keeping(100) as cache:
        for name, nbytes in (("a", 40), ("b", 40), ("c", 20)):
            await cache.get(key(name), at_once(nbytes))
        await cache.get(key("a"), Preparation())
        await cache.get(key("d"), at_once(30))
        assert cache.statistics().bytes == 90
        for name, is_kept in (("a", True), ("c", True), ("d", True), ("b", False)):
            misses = cache.statistics().misses
            await cache.get(key(name), at_once(1))
            assert (cache.statistics().misses == misses) is is_kept, name


async def test_what_is_larger_than_the_bound_is_given_and_not_kept():
    async with keeping(100) as cache:
        await cache.get(key("a"), at_once(100))
        assert (await cache.get(key("b"), at_once(101))).nbytes == 101
        assert cache.statistics() == CacheStatistics(entries=1, bytes=100, hits=0, misses=2, in_flight=0)


async def ask(cache: MediaCache, preparation: Preparation, times: int, nursery: trio.Nursery) -> list:
    """Have an image asked for so often; the answers, as they come."""
    answers: list = []

    async def one() -> None:
        try:
            answers.append(await cache.get(key("a"), preparation))
        except (MediaError, UnavailableError) as error:
            answers.append(error)

    for _ in range(times):
        nursery.start_soon(one)
    await wait_all_tasks_blocked()
    return answers


@pytest.mark.parametrize("max_bytes", [100, 0])
async def test_ten_who_ask_for_one_image_have_it_prepared_once(max_bytes):
    preparation = Preparation()
    async with keeping(max_bytes) as cache:
        async with trio.open_nursery() as nursery:
            answers = await ask(cache, preparation, 10, nursery)
            assert cache.statistics().in_flight == 1
            preparation.goes_on.set()
        assert len(answers) == 10
        assert len(set(map(id, answers))) == preparation.begun == 1
        stats = cache.statistics()
        assert (stats.hits, stats.misses, stats.entries) == (9, 1, 1 if max_bytes else 0)


async def test_a_request_that_is_cancelled_cancels_no_other():
    preparation = Preparation()
    async with keeping() as cache, trio.open_nursery() as staying:
        async with trio.open_nursery() as leaving:
            left = await ask(cache, preparation, 1, leaving)
            answers = await ask(cache, preparation, 9, staying)
            leaving.cancel_scope.cancel()
        assert preparation.cancelled == 0
        preparation.goes_on.set()
        await wait_all_tasks_blocked()
        assert left == []
        assert len(answers) == 9
        assert preparation.begun == 1


async def test_when_all_have_left_the_preparation_is_cancelled():
    first, second = Preparation(), Preparation()
    async with keeping() as cache:
        async with trio.open_nursery() as nursery:
            await ask(cache, first, 10, nursery)
            nursery.cancel_scope.cancel()
        await wait_all_tasks_blocked()
        assert first.cancelled == 1
        assert cache.statistics() == CacheStatistics(entries=0, bytes=0, hits=9, misses=1, in_flight=0)
        second.goes_on.set()
        assert (await cache.get(key("a"), second)).nbytes == 10


async def test_who_comes_as_the_last_one_leaves_is_answered():
    """Whichever of the two the scheduler lets run first."""

    async def leave(scope: trio.CancelScope, cache: MediaCache, preparation: Preparation) -> None:
        with scope:
            await cache.get(key("a"), preparation)

    for _ in range(20):
        scope, first, second = trio.CancelScope(), Preparation(), Preparation()
        async with keeping() as cache:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(leave, scope, cache, first)
                await wait_all_tasks_blocked()
                scope.cancel()
                answers = await ask(cache, second, 3, nursery)
                first.goes_on.set()
                second.goes_on.set()
            assert [answer.nbytes for answer in answers] == [10] * 3
            assert second.begun == first.cancelled


async def test_all_who_wait_are_told_of_a_failure_and_it_is_not_kept():
    failing = Preparation(error=MediaError("broken"))
    async with keeping() as cache:
        async with trio.open_nursery() as nursery:
            answers = await ask(cache, failing, 10, nursery)
            failing.goes_on.set()
        assert [str(error) for error in answers] == ["broken"] * 10
        assert failing.begun == 1
        assert (await cache.get(key("a"), at_once(10))).nbytes == 10


async def test_what_is_under_way_when_all_is_forgotten_is_given_and_not_kept():
    before, after = Preparation(10), Preparation(20)
    async with keeping() as cache:
        await cache.get(key("b"), at_once(10))
        async with trio.open_nursery() as nursery:
            old = await ask(cache, before, 2, nursery)
            cache.clear()
            assert (cache.statistics().entries, cache.statistics().bytes) == (0, 0)
            new = await ask(cache, after, 2, nursery)
            assert cache.statistics().in_flight == 2
            before.goes_on.set()
            await wait_all_tasks_blocked()
            assert [found.nbytes for found in old] == [10, 10]
            assert cache.statistics().entries == 0
            after.goes_on.set()
        assert [found.nbytes for found in new] == [20, 20]
        assert (await cache.get(key("a"), Preparation())).nbytes == 20


async def test_who_waits_when_the_server_shuts_down_is_told():
    cache, preparation = MediaCache(100), Preparation()
    async with trio.open_nursery() as waiters, trio.open_nursery() as nursery:
        await nursery.start(cache.run)
        answers = await ask(cache, preparation, 3, waiters)
        nursery.cancel_scope.cancel()
    assert [type(answer) for answer in answers] == [UnavailableError] * 3
    assert cache.statistics().in_flight == 0
    with pytest.raises(UnavailableError):
        await cache.get(key("a"), preparation)
