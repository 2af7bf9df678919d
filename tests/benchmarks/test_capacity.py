"""The constants and predictions of benchmarks/capacity.md are the measured ones, and what follows from them."""

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping

import pytest

from benchmarks.report import RESULTS
from tests.server.server_process import ROOT

pytestmark = pytest.mark.unit
PAGE = (ROOT / "benchmarks" / "capacity.md").read_text()
DOCUMENT = json.loads((RESULTS / "scaling_constants.json").read_text())
Constants = Mapping[str, float]
MEASURED: Constants = DOCUMENT["constants"]

COSTLIEST: Constants = {
    **{name: max(each[name] for each in DOCUMENT["rounds"]) for name in MEASURED},
    # Batches differ from the line through them by more than one round from another.
    **{name: MEASURED[name] / (1 - MEASURED["fit_error"]) for name in ("fixed_s", "seconds_per_token")},
}
"""Each cost as in the round in which it was highest, and the batch that the line underrates most."""

GPU_TOKENS_PER_S = 16384 / (0.005 + 16384 / 40_000)
"""Assumed."""

ROWS, TOKENS = 1.7, 170.6024
"""Of a request, on average: one in ten has eight rows; lengths are log-normal around 64 tokens, from 4 to 512."""

AIMED_SHARE = 0.8
"""Of its time, what an API process may be busy for at all that the engines can compute."""


def tokens_per_s(constants: Constants) -> float:
    return 2048 / (constants["fixed_s"] + 2048 * constants["seconds_per_token"])


def engines_per_s(engines: int, tokens_per_s: float) -> float:
    return engines * tokens_per_s / TOKENS


def api_per_s(constants: Constants, engines: int, processes: int) -> float:
    request_s = constants["request_s"] + (ROWS - 1) * constants["row_s"]
    return processes * (1 - engines * constants["link_api_s"]) / request_s


def rows_below(heading: str) -> Iterator[list[str]]:
    """Yield the cells of the page's table whose first column has that heading."""
    _, table = PAGE.split(f"| {heading} |", 1)
    for line in table.partition("\n\n")[0].splitlines()[2:]:
        yield [cell.strip() for cell in line.strip("|").split("|")]


@pytest.mark.parametrize(
    ("name", "of", "form"),
    [
        ("tokens/s", lambda each: round(tokens_per_s(each), -1), lambda n: f"{n:,.0f}"),
        ("request", lambda each: each["request_s"], lambda seconds: f"{1e3 * seconds:.2f}"),
        ("row", lambda each: each["row_s"], lambda seconds: f"{1e3 * seconds:.2f}"),
        ("link", lambda each: each["link_api_s"], lambda seconds: f"{1e3 * seconds:.2f}"),
    ],
)
def test_each_constant_of_the_page_has_the_spread_of_its_rounds(
    name: str, of: Callable[[Constants], float], form: Callable[[float], str]
):
    in_rounds = [of(each) for each in DOCUMENT["rounds"]]
    (found,) = [cells[1:3] for cells in rows_below("constant") if cells[0] == name]
    assert found[0].removesuffix(" ms") == form(of(MEASURED))
    assert found[1] == f"{form(min(in_rounds))} to {form(max(in_rounds))}"


def test_the_slowest_batch_that_was_measured_is_that_of_the_costliest_case():
    """The line through the batches is farthest from four rows of 512 tokens."""
    table = (RESULTS / "scaling_constants.md").read_text()
    took_ms, line_ms = map(float, re.search(r"\| 4 × 512 \| (\S+) \| (\S+) \|", table).groups())
    assert 2048 / tokens_per_s(COSTLIEST) == pytest.approx(took_ms / 1e3, rel=1e-3)
    assert 2048 / tokens_per_s(MEASURED) == pytest.approx(line_ms / 1e3, rel=1e-3)
    assert f"{round(tokens_per_s(COSTLIEST), -1):,.0f} tokens/s" in PAGE


def test_the_predictions_of_the_page_are_those_of_the_model():
    checked = 0
    for cells in rows_below("engines of one core"):
        count, processes = int(re.match(r"[\d,]+", cells[0])[0].replace(",", "")), int(cells[1])
        speeds = [GPU_TOKENS_PER_S] * 2 if "GPU" in cells[0] else [*map(tokens_per_s, (MEASURED, COSTLIEST))]
        by_engines = [engines_per_s(count, each) for each in speeds]
        by_api = [api_per_s(each, count, processes) for each in (MEASURED, COSTLIEST)]
        least = [*map(min, by_engines, by_api)]
        assert [f"{each:,.0f}" for each in (by_engines[0], by_api[0], *least)] == cells[2:6], cells[0]
        checked += 1
    assert checked == 6


def test_what_links_cost_a_thousand_engines_is_as_the_page_says():
    dear = {**MEASURED, "link_api_s": COSTLIEST["link_api_s"]}
    shares = [f"{100_000 * each['link_api_s']:.0f} %" for each in (MEASURED, dear)]
    wanted = engines_per_s(1000, tokens_per_s(MEASURED)) / AIMED_SHARE
    enough = [math.ceil(wanted / api_per_s(each, 1000, 1)) for each in (MEASURED, COSTLIEST)]
    text = " ".join(PAGE.split())
    assert f"with 1,000 engines they take {shares[0]} of each API process, and {shares[1]} if a link" in text
    assert f"114 API processes can do {api_per_s(dear, 1000, 114):,.0f} requests/s" in text
    assert f"one with 1,000 engines needs {enough[0]}, or {enough[1]} in the costliest case" in text
