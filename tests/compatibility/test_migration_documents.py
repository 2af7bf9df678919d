"""The pages about moving from other servers: what becomes of each flag, route and field, and an example that runs.

The lists were made from the packages of vLLM 0.33.0 (``vllm serve --help=all`` of 0.32.0 and the arguments that 0.33.0
adds to it, the routes of a server of a pooling model, and its request classes) and infinity
0.0.78 (``infinity_emb v1 --help`` and ``v2 --help``, its request classes, and the variables that it reads).
"""

import re
from pathlib import Path

import pytest

from tests.compatibility.tei_record import RECORD
from tests.compatibility.worked_example import SECTIONS, WorkedExample, sections
from tests.server.server_process import ROOT

LISTS = Path(__file__).parent
NAMES = ("vllm", "infinity")
"""The servers whose flags and fields are listed in files beside this one."""
PAGES = (*NAMES, "tei")
OF_ANOTHER_MEANING = {("infinity", "--engine")}
"""infinity's is what computes, this server's where."""
LONGEST_LINE = 140
MODEL = "sentence-transformers/all-MiniLM-L6-v2"
"""The model of the examples, which is packaged."""


def page_path(name: str) -> Path:
    return ROOT / "docs" / f"migrate-from-{name}.md"


def in_backticks(text: str) -> set[str]:
    """Return what a text has in backticks, outside of fenced blocks."""
    return set(re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)))


def flags_of(name: str) -> list[str]:
    """Return the flags of a server; ``--[no-]flag`` in a list is one and its negation."""
    if name == "tei":
        return [*RECORD["flags"]]
    listed = (LISTS / f"{name}_flags.txt").read_text().split()
    return [flag.replace("[no-]", no) for flag in listed for no in (("", "no-") if "[no-]" in flag else ("",))]


def our_flags() -> set[str]:
    """Return the settings of this server, and their negations."""
    settings = (ROOT / "docs" / "settings.md").read_text()
    ours = {*re.findall(r"^\| `(--[\w-]+)` \|", settings, flags=re.M), "--config"}
    return ours | {f"--no-{flag[2:]}" for flag in ours}


def groups_of_flags(section: str) -> list[str]:
    """Return the flags of each item of a list, which end it: it says why they are not offered."""
    return re.findall(r"^- \*\*.*?\.\s+((?:`--[\w-]+`,?\s*)+)$", section, flags=re.M | re.S)


def first_name(field: str) -> str:
    return field.partition(".")[0]


def fields_of(name: str) -> dict[str, set[str]]:
    """Return the fields of each route's request; a route may have several lines."""
    if name == "tei":
        return {route.split()[1]: {*map(first_name, facts["fields"])} for route, facts in RECORD["routes"].items()}
    fields: dict[str, set[str]] = {}
    for line in (LISTS / f"{name}_fields.txt").read_text().splitlines():
        route, _, names = line.partition(":")
        fields.setdefault(route, set()).update(names.split())
    return fields


def test_the_pages_are_those_of_which_there_are_lists():
    assert {page.name for page in (ROOT / "docs").glob("migrate-from-*.md")} == {page_path(name).name for name in PAGES}


@pytest.mark.parametrize("name", PAGES)
def test_a_page_has_its_five_sections(name: str):
    assert [*sections(page_path(name))] == SECTIONS


def test_every_flag_and_variable_of_tei_has_a_row():
    rows = re.findall(r"^\| (.*?) \|", sections(page_path("tei"))["Flags"], flags=re.M)
    assert sorted({*RECORD["flags"], *RECORD["variables"]} - in_backticks(" ".join(rows))) == []


def test_every_variable_of_infinity_that_is_no_flag_has_a_row():
    variables = (LISTS / "infinity_variables.txt").read_text().split()
    section = sections(page_path("infinity"))["Flags"].partition("| variable without a flag |")[2]
    rows = re.findall(r"^\| (`[A-Z].*?`) \|", section, flags=re.M)
    assert sorted(re.findall(r"`(\w+)`", " ".join(rows))) == variables


def test_every_route_of_vllm_has_a_row():
    listed = re.findall(r"^\| (`/.*?`) \|", sections(page_path("vllm"))["Routes"], flags=re.M)
    assert sorted(re.findall(r"`(/\S*?)`", " ".join(listed))) == sorted((LISTS / "vllm_routes.txt").read_text().split())


@pytest.mark.parametrize("name", NAMES)
def test_every_flag_is_listed_once(name: str):
    section = sections(page_path(name))["Flags"]
    rows = re.findall(r"^\| (`-.*?`) \|", section, flags=re.M)
    listed = re.findall(r"`(--[\w-]+)`", " ".join([*rows, *groups_of_flags(section)]))
    assert sorted(listed) == sorted(flags_of(name))


@pytest.mark.parametrize("name", PAGES)
def test_no_setting_of_this_server_is_listed_as_not_offered_or_not_needed(name: str):
    section = sections(page_path(name))["Flags"]
    rows = re.findall(r"^\| (`-.*?`) \| not (?:offered|needed)", section, flags=re.M)
    denied = re.findall(r"`(--[\w-]+)`", " ".join([*rows, *groups_of_flags(section)]))
    assert denied
    found = {(name, flag) for flag in denied if flag in our_flags()}
    assert found == {exception for exception in OF_ANOTHER_MEANING if exception[0] == name}


@pytest.mark.parametrize("name", NAMES)
def test_every_flag_of_a_page_is_this_server_s_or_the_other_s(name: str):
    named = {flag.split()[0] for flag in in_backticks(page_path(name).read_text()) if flag.startswith("--")}
    assert sorted(named - our_flags() - set(flags_of(name))) == []


@pytest.mark.parametrize("name", PAGES)
def test_every_field_has_a_row_and_every_route_a_place(name: str):
    fields = fields_of(name)
    if name in NAMES:
        assert sorted(set(fields) - in_backticks(page_path(name).read_text())) == []
    rows = re.findall(r"^\| (`.*?`) \|", sections(page_path(name))["Request fields"], flags=re.M)
    assert sorted(set().union(*fields.values()) - in_backticks("\n".join(rows))) == []


@pytest.mark.parametrize("name", PAGES)
def test_lines_are_of_a_readable_length(name: str):
    assert [line for line in page_path(name).read_text().splitlines() if len(line) > LONGEST_LINE] == []


@pytest.mark.parametrize("name", PAGES)
def test_the_flags_that_a_page_offers_exist(name: str):
    rows = re.findall(r"^\| `.*?` \| (.*?) \|", sections(page_path(name))["Flags"], flags=re.M)
    offered = {flag for row in rows for flag in re.findall(r"`(--[\w-]+)", row)}
    offered |= {word for word in WorkedExample.of(page_path(name)).command if word.startswith("--")}
    assert offered
    assert not offered - our_flags()


@pytest.mark.slow
@pytest.mark.parametrize("name", PAGES)
def test_the_example_of_a_page_runs(name: str, minilm: Path, tmp_path: Path):
    example = WorkedExample.of(page_path(name))
    assert MODEL in example.command, "the example's model is the one that the tests have"
    with example.running({MODEL: minilm}, tmp_path / "server.log") as server:
        example.wait_healthy(server)
        example.probe(server)
        assert example.run_client(server) == example.printed
