"""The simulated cluster: what is known by arithmetic, what must not be lost, and what a lost machine takes along."""

import attrs
import pytest

from benchmarks.capacity import AIMED_SHARE, predict, with_enough_processes
from benchmarks.simulated_cluster import simulate
from benchmarks.simulated_scenario import LINK_TIMEOUT_S, Costs, Device, Outcome, Scenario, Traffic
from tests.lanes import sampled
from trio_pool_serve.engine.remote.connectors import HostConnector

DEVICE = Device(name="a device", fixed_s=0.002, seconds_per_token=1e-4, max_batch_tokens=2048)

COSTS = Costs(request_s=0.001, row_s=1e-4, link_s=2e-4)

ALIKE = Traffic(spread=0.0, several_share=0.0)
"""Single rows of one length."""

MIXED = Scenario(device=DEVICE, costs=COSTS, seconds=8.0, engines=4, api_processes=2)


def without_times(outcome: Outcome) -> Outcome:
    return attrs.evolve(outcome, routing_us=0.0, admission_us=0.0)


def test_a_request_to_an_idle_engine_takes_what_its_parts_take():
    scenario = Scenario(device=DEVICE, costs=COSTS, traffic=ALIKE, load=0.002, seconds=60.0)
    outcome = simulate(scenario)
    row_s = DEVICE.fixed_s + ALIKE.median_tokens * DEVICE.seconds_per_token
    assert outcome.answered == outcome.offered > 5
    assert outcome.p50_s == pytest.approx(COSTS.request_s / (1 - COSTS.link_s) + 2 * scenario.network_s + row_s)


@pytest.mark.slow
def test_an_engine_with_more_than_it_can_do_does_what_its_device_can():
    scenario = Scenario(device=DEVICE, costs=COSTS, traffic=ALIKE, load=2.0, seconds=20.0, warm_s=5.0)
    outcome = simulate(scenario)
    assert outcome.goodput_per_s == pytest.approx(scenario.capacity_per_s, rel=0.02)
    assert outcome.busy == pytest.approx(1.0, abs=0.01)
    assert outcome.refused > 0.3 * outcome.offered


@sampled(
    "change",
    [{"load": 1.5}, {"lost_engines": 1}, {"lost_engines": 1, "retries_lost": True, "load": 1.5}, {"slow_engines": 1}],
    keep=[{"lost_engines": 1}, {"slow_engines": 1}],
    ids=str,
)
def test_every_request_ends_once(change):
    outcome = simulate(attrs.evolve(MIXED, **change))
    assert outcome.offered == outcome.answered + outcome.refused + outcome.failed
    assert outcome.answered > 100


@pytest.mark.slow
def test_the_same_seed_gives_the_same_and_another_does_not():
    first, second = simulate(MIXED), simulate(MIXED)
    assert without_times(first) == without_times(second)
    assert without_times(simulate(attrs.evolve(MIXED, seed=1))) != without_times(first)


@pytest.mark.slow
def test_an_engine_that_is_twice_as_fast_gets_about_twice_the_tokens():
    scenario = Scenario(
        device=DEVICE, costs=COSTS, traffic=ALIKE, engines=2, slow_engines=1, slowness=2.0, load=1.0, seconds=30.0
    )
    outcome = simulate(scenario)
    of_slow, of_fast = sorted(outcome.tokens)
    assert 1.7 < of_fast / of_slow < 2.3


def test_a_lost_machine_fails_the_rows_that_were_there_and_no_others():
    lost = attrs.evolve(MIXED, traffic=ALIKE, lost_engines=1, api_processes=1)
    outcome = simulate(lost)
    assert outcome.failed == outcome.lost_rows > 0
    assert simulate(attrs.evolve(lost, lost_engines=0)).failed == 0


def test_rows_that_are_sent_again_do_not_fail():
    outcome = simulate(attrs.evolve(MIXED, traffic=ALIKE, lost_engines=1, retries_lost=True))
    assert outcome.lost_rows > 0
    assert outcome.failed == 0
    assert outcome.answered + outcome.refused == outcome.offered


def test_requests_that_find_no_engine_fail_and_later_ones_do_not():
    lost = attrs.evolve(MIXED, traffic=ALIKE, lost_engines=4, lost_at_s=3.0, back_at_s=5.0, seconds=12.0)
    outcome = simulate(lost)
    longest_s = lost.back_at_s - lost.lost_at_s + lost.longest_pause_s
    assert outcome.lost_rows < outcome.failed < longest_s * lost.requests_per_s
    assert outcome.offered == outcome.answered + outcome.refused + outcome.failed


@pytest.mark.slow
def test_too_few_api_processes_are_the_limit_that_the_model_predicts():
    few = attrs.evolve(MIXED, traffic=ALIKE, engines=20, costs=attrs.evolve(COSTS, request_s=0.01), load=0.9)
    capacity = predict(few)
    assert capacity.requests_per_s == capacity.api_per_s < few.requests_per_s
    assert simulate(few).goodput_per_s == pytest.approx(capacity.api_per_s, rel=0.02)


def test_enough_api_processes_are_the_fewest_that_are_not_too_busy():
    enough = with_enough_processes(attrs.evolve(MIXED, engines=500))
    one_fewer = attrs.evolve(enough, api_processes=enough.api_processes - 1)
    assert predict(one_fewer).api_per_s * AIMED_SHARE < enough.capacity_per_s <= predict(enough).api_per_s * AIMED_SHARE


def test_links_are_given_up_after_the_time_that_the_server_has():
    assert attrs.fields_dict(HostConnector)["timeout_s"].default == LINK_TIMEOUT_S
