"""The README is short, and its numbers are those of the results. ``test_page_servers.py`` runs its commands."""

import json
import re
from collections import Counter
from pathlib import Path
from statistics import median

import pytest

pytestmark = pytest.mark.unit

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
PEERS = json.loads((ROOT / "benchmarks" / "results" / "peers.json").read_text())
ROUNDS = {(load["server"], load["clients"], load["batch"]): load["rounds"] for load in PEERS["loads"]}


def page(name: str) -> str:
    return (ROOT / "docs" / f"{name}.md").read_text()


def test_it_fits_on_two_screens():
    assert len(README.splitlines()) <= 120
    assert len(README.split()) <= 900


@pytest.mark.parametrize("server", ["ours", "vllm", "infinity"])
@pytest.mark.parametrize(
    ("field", "places"), [("requests_per_s", (0, 0)), ("p50_ms", (1, 0)), ("server_cpu_ms", (1, 1))]
)
def test_its_table_has_the_medians_at_1_and_32_clients(server: str, field: str, places: tuple[int, int]):
    values = [median(each[field] for each in ROUNDS[server, clients, 1]) for clients in (1, 32)]
    cell = " / ".join(f"{value:.{digits}f}" for value, digits in zip(values, places, strict=True))
    assert f"| {cell} |" in README


def test_it_tells_how_many_times_vllm_s_speed_was_measured():
    ratios, cpu = [], []
    for (server, *load), theirs in ROUNDS.items():
        if server == "vllm":
            pairs = [*zip(ROUNDS["ours", *load], theirs, strict=True)]
            ratios.append(median(ours["requests_per_s"] / its["requests_per_s"] for ours, its in pairs))
            of_ours, of_theirs = (
                median(each["server_cpu_ms"] for each in rounds) for rounds in zip(*pairs, strict=True)
            )
            cpu.append(of_ours / of_theirs)
    assert f"answers {min(ratios):.1f} to {max(ratios):.1f} times vLLM's requests/s" in README
    assert f"for {min(cpu):.0%} to {max(cpu):.0%} of its CPU time".replace("%", "", 1).replace("%", " %") in README


def test_it_counts_what_the_comparisons_list():
    same, answers = re.findall(r"\[(\d+) of (\d+)\]\(docs/compared-with-vllm.md", README)[0]
    assert {same, answers} <= {*re.findall(r"\d+", page("compared-with-vllm").partition("\n## ")[0])}
    items = re.findall(r"\| (same|more|differs) \|", page("compared-with-tei"))
    assert f"[{len(items) - items.count('differs')} of {len(items)}](docs/compared-with-tei.md)" in README


def test_it_counts_the_models_by_the_level_of_their_check():
    levels = Counter(re.findall(r"^\| \S+ \| yes \| (\w+) \|", page("published-models"), re.M))
    assert levels["weights"] == 2
    assert (
        f"Two models were compared with their published weights, {levels['files']} with their published config"
        in README
    )
    assert f"these {re.findall(r'lists ([0-9]+) models', README)[0]} models" in page("published-models")
