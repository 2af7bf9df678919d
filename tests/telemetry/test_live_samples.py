"""Samples of a server: computed from two snapshots of its metrics, and taken for its viewers, one a second."""

import json
from collections.abc import Sequence

import pytest
import trio
from prometheus_client import CollectorRegistry, Histogram

from trio_pool_serve.telemetry.live_samples import AT_ONCE, KEPT, LiveHistory, Totals, quantile, sample_between
from trio_pool_serve.telemetry.metrics import Metrics
from trio_pool_serve.telemetry.snapshots import Snapshot, families_of

pytestmark = pytest.mark.unit


def totals(*processes: Metrics, at: float, load: dict | None = None) -> Totals:
    return Totals.of([Snapshot(families_of(each.registry), load or {}) for each in processes], at)


def sample(before: Totals, now: Totals) -> dict:
    return json.loads(sample_between(before, now, number=7, state="ready"))


def test_rates_are_per_second_and_of_all_processes():
    first, second = Metrics(), Metrics()
    first.requests.inc(100)
    before = totals(first, second, at=10.0)
    first.requests.inc(6)
    second.requests.inc(4)
    second.failures.inc(1)
    first._refusals["queue"].inc(4)
    found = sample(before, totals(first, second, at=12.0))
    assert (found["requests"], found["failures"]) == (5, 0.5)
    assert found["refusals"] == dict.fromkeys(found["refusals"], 0) | {"queue": 2}
    assert (found["number"], found["state"]) == (7, "ready")


def test_quantiles_are_of_observations_since_the_last_snapshot_only():
    metrics = Metrics()
    metrics.of_engine("m").queue.observe_all([50.0] * 1000)
    before = totals(metrics, at=1.0)
    metrics.of_engine("m").queue.observe_all([0.002] * 99 + [0.2])
    found = sample(before, totals(metrics, at=2.0))["stages"]["queue"]
    assert 0.001 < found[0] <= 0.0025
    assert 0.001 < found[1] <= 0.0025  # the 99th of 100 is a short one
    assert sample(before, totals(metrics, at=2.0))["stages"]["render"] == [None, None]


def test_quantiles_equal_prometheus_s():
    """Ten observations up to 1 and ten up to 3: half of them are below 1, and 0.75 are in the middle of the rest."""
    registry = CollectorRegistry()
    histogram = Histogram("trio_pool_serve_request_seconds", "x", buckets=(1.0, 3.0), registry=registry)
    empty = Totals.of([Snapshot(families_of(registry), {})], 0.0)
    for value in [0.5] * 10 + [2.0] * 10:
        histogram.observe(value)
    full = Totals.of([Snapshot(families_of(registry), {})], 1.0)
    passed = full.since(empty)
    assert [quantile(passed, "request_seconds", share) for share in (0.25, 0.5, 0.75, 1.0)] == [0.5, 1.0, 2.0, 3.0]
    histogram.observe(100.0)  # above all bounds: the highest of them
    beyond = Totals.of([Snapshot(families_of(registry), {})], 2.0).since(empty)
    assert quantile(beyond, "request_seconds", 1.0) == 3.0


def test_a_batch_is_full_in_proportion_to_its_budget():
    metrics = Metrics()
    load = {"models": {"m": {"batch_token_budget": 1000, "queued_rows": 3, "queued_tokens": 9}}}
    load["models"]["small"] = {"batch_token_budget": 100}
    before = totals(metrics, at=1.0, load=load)
    engine = metrics.of_engine("m")
    engine.batch_tokens.observe(250)
    engine.batch_rows.observe(5)
    engine.padding_waste.observe(0.1)
    found = sample(before, totals(metrics, at=2.0, load=load))
    assert (found["batch_fill"], found["batch_rows"], found["padding"]) == (0.25, 5, 0.1)
    assert (found["queued_rows"], found["queued_tokens"]) == (3, 9)
    metrics.of_engine("small").batch_tokens.observe(75)
    assert sample(before, totals(metrics, at=2.0, load=load))["batch_fill"] == 0.5, "each by its model's budget"


def test_a_process_that_did_not_answer_in_time_makes_no_spike():
    first, second = Metrics(), Metrics()
    second.requests.inc(500_000)
    usage = [{"processes": {name: {"pid": pid, "cpu_seconds": 1.0}}} for name, pid in (("api 0", 1), ("api 1", 2))]
    pairs = [Snapshot(families_of(each.registry), load) for each, load in zip((first, second), usage, strict=True)]
    both, one = Totals.of(pairs, 1.0), Totals.of(pairs[:1], 2.0)
    first.requests.inc(20)
    again = Totals.of([Snapshot(families_of(first.registry), usage[0]), pairs[1]], 3.0)
    assert sample(both, one)["requests"] == 0
    assert sample(one, again)["requests"] == 20


def test_cpu_time_is_the_share_of_the_last_second():
    metrics = Metrics()
    loads = [
        {"processes": {"server": {"pid": 7, "cpu_seconds": seconds, "memory_bytes": 5}}}
        for seconds in (12345.6, 12346.1)
    ]
    found = sample(totals(metrics, at=10.0, load=loads[0]), totals(metrics, at=11.0, load=loads[1]))
    assert found["processes"] == {"server": {"pid": 7, "memory_bytes": 5, "cpu": 0.5}}
    loads[1]["processes"]["server"]["pid"] = 8  # another process of that name
    found = sample(totals(metrics, at=10.0, load=loads[0]), totals(metrics, at=11.0, load=loads[1]))
    assert "cpu" not in found["processes"]["server"]


# -- viewers ----------------------------------------------------------------------------------------------


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


async def test_a_later_viewer_gets_the_history_first(history, autojump_clock):
    await view(history, 3, [])
    assert await all_after(history, 0) == [1, 2, 3]
    assert await all_after(history, 2) == [3]
    assert await all_after(history, 3) == [4]
    assert await all_after(history, 500) == [1, 2, 3, 4], "of another server"


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


async def test_there_are_no_rates_at_first_and_over_an_unwatched_time(history, source, autojump_clock):
    samples = []
    for number in range(3):
        if number == 2:
            source.metrics.requests.inc(1000)
            await trio.sleep(600)
        _, (sample,) = await history.samples_after(number)
        samples.append(json.loads(sample))
    assert ["requests" in sample for sample in samples] == [False, True, False]
    assert samples[0]["queued_rows"] == 0
