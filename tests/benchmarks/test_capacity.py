"""The constants and the predictions of docs/scaling.md are those that were measured, and what follows from them."""

import json
import re
from collections.abc import Callable, Iterator

import attrs
import pytest

from benchmarks.capacity import ASSUMED_GPU, Measured, predict, with_enough_processes
from benchmarks.report import RESULTS
from benchmarks.simulated_scenario import Scenario
from tests.server.server_process import ROOT

pytestmark = pytest.mark.unit

PAGE = (ROOT / "docs" / "scaling.md").read_text()

DOCUMENT = json.loads((RESULTS / "scaling_constants.json").read_text())

MEASURED, COSTLIEST = Measured.read(), Measured.read_costliest()


def rows_below(heading: str) -> Iterator[list[str]]:
    """Yield the cells of the page's table whose first column has that heading."""
    _, table = PAGE.split(f"| {heading} |", 1)
    for line in table.partition("\n\n")[0].splitlines()[2:]:
        yield [cell.strip() for cell in line.strip("|").split("|")]


def scenario(measured: Measured, engines: int, api_processes: int = 1) -> Scenario:
    return Scenario(device=measured.device, costs=measured.costs, engines=engines, api_processes=api_processes)


@pytest.mark.parametrize(
    ("name", "of", "form"),
    [
        ("tokens/s", lambda each: 2048 / (each["fixed_s"] + 2048 * each["seconds_per_token"]), lambda n: f"{n:,.0f}"),
        ("request", lambda each: each["request_s"], lambda seconds: f"{1e3 * seconds:.2f}"),
        ("row", lambda each: each["row_s"], lambda seconds: f"{1e3 * seconds:.2f}"),
        ("link", lambda each: each["link_api_s"], lambda seconds: f"{1e3 * seconds:.2f}"),
    ],
)
def test_each_constant_of_the_page_has_the_spread_of_its_rounds(
    name: str, of: Callable[[dict[str, float]], float], form: Callable[[float], str]
):
    in_rounds = [of(each) for each in DOCUMENT["rounds"]]
    (found,) = [cells[1:3] for cells in rows_below("constant") if cells[0] == name]
    if name == "tokens/s":  # to three digits
        in_rounds = [round(each, -1) for each in in_rounds]
        assert found[0] == form(round(of(DOCUMENT["constants"]), -1))
    else:
        assert found[0] == f"{form(of(DOCUMENT['constants']))} ms"
    assert found[1] == f"{form(min(in_rounds))} to {form(max(in_rounds))}"


def test_the_slowest_batch_that_was_measured_is_that_of_the_costliest_case():
    """The line through the batches is farthest from four rows of 512 tokens."""
    table = (RESULTS / "scaling_constants.md").read_text()
    (took_ms, line_ms) = map(float, re.search(r"\| 4 × 512 \| (\S+) \| (\S+) \|", table).groups())
    assert 2048 / COSTLIEST.device.tokens_per_s == pytest.approx(took_ms / 1e3, rel=1e-3)
    assert 2048 / MEASURED.device.tokens_per_s == pytest.approx(line_ms / 1e3, rel=1e-3)
    assert f"{round(COSTLIEST.device.tokens_per_s, -1):,.0f} tokens/s" in PAGE


def test_nothing_costs_less_in_the_costliest_case():
    least = attrs.asdict(MEASURED.costs) | {"link_engine_s": MEASURED.link_engine_s}
    most = attrs.asdict(COSTLIEST.costs) | {"link_engine_s": COSTLIEST.link_engine_s}
    assert all(most[name] > seconds for name, seconds in least.items())
    assert COSTLIEST.device.tokens_per_s < MEASURED.device.tokens_per_s


def test_the_predictions_of_the_page_are_those_of_the_model():
    checked = 0
    for engines, processes, by_engines, by_api, prediction, costliest, *_ in rows_below("engines of one core"):
        count = int(re.match(r"[\d,]+", engines)[0].replace(",", ""))
        both = [scenario(measured, count, int(processes)) for measured in (MEASURED, COSTLIEST)]
        if "GPU" in engines:
            both = [attrs.evolve(each, device=ASSUMED_GPU) for each in both]
        usual, worst = map(predict, both)
        numbers = (usual.engines_per_s, usual.api_per_s, usual.requests_per_s, worst.requests_per_s)
        assert [f"{each:,.0f}" for each in numbers] == [by_engines, by_api, prediction, costliest], engines
        checked += 1
    assert checked == 6


def test_what_links_cost_a_thousand_engines_is_as_the_page_says():
    dear = scenario(MEASURED, 1000, 114)
    dear = attrs.evolve(dear, costs=attrs.evolve(MEASURED.costs, link_s=COSTLIEST.costs.link_s))
    shares = [f"{100 * each.link_share:.0f} %" for each in (scenario(MEASURED, 1000), dear)]
    enough = [
        with_enough_processes(attrs.evolve(scenario(MEASURED, 1000), costs=measured.costs)).api_processes
        for measured in (MEASURED, COSTLIEST)
    ]
    text = " ".join(PAGE.split())
    assert f"with 1,000 engines they take {shares[0]} of each API process, and {shares[1]} if a link" in text
    assert f"114 API processes can do {predict(dear).requests_per_s:,.0f} requests/s" in text
    assert f"one with 1,000 engines needs {enough[0]}, or {enough[1]} in the costliest case" in text
