"""The pages about moving from vLLM and infinity say what becomes of each of their flags, routes and request fields.

None of them, nor the page about TEI, denies what this server has. Other checks of that page are in
``test_worked_examples.py``.

The lists were made from the packages of vLLM 0.33.0 (``vllm serve --help=all`` of 0.32.0 and the arguments that 0.33.0
adds to it, the routes of a server of a pooling model, and its request classes) and infinity
0.0.78 (``infinity_emb v1 --help`` and ``v2 --help``, its request classes, and the variables that it reads).
"""

import re
from pathlib import Path

import pytest

from tests.compatibility.worked_example import sections
from tests.server.server_process import ROOT

LISTS = Path(__file__).parent
NAMES = ("vllm", "infinity")
"""The servers whose flags are listed in files beside this one."""
PAGES = ("vllm", "infinity", "tei")
OF_ANOTHER_MEANING = {("infinity", "--engine")}
"""infinity's is what computes, this server's where."""
NUMBERS_OF_FLAGS = {"vllm": 411, "infinity": 39}
LONGEST_LINE = 140


def page_path(name: str) -> Path:
    return ROOT / "docs" / f"migrate-from-{name}.md"


def in_backticks(text: str) -> set[str]:
    """Return what a text has in backticks, outside of fenced blocks."""
    return set(re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)))


def flags_of(name: str) -> list[str]:
    return (LISTS / f"{name}_flags.txt").read_text().split()


def our_flags() -> set[str]:
    """Return the settings of this server, and their negations."""
    settings = (ROOT / "docs" / "settings.md").read_text()
    ours = {*re.findall(r"^\| `(--[\w-]+)` \|", settings, flags=re.M), "--config"}
    return ours | {f"--no-{flag[2:]}" for flag in ours}


def groups_of_flags(section: str) -> list[str]:
    """Return the flags of each item of a list, which end it: it says why they are not offered."""
    return re.findall(r"^- \*\*.*?\.\s+((?:`--[\w-]+`,?\s*)+)$", section, flags=re.M | re.S)


def fields_of(name: str) -> dict[str, set[str]]:
    """Return the fields of each route's request; a route may have several lines."""
    fields: dict[str, set[str]] = {}
    for line in (LISTS / f"{name}_fields.txt").read_text().splitlines():
        route, _, names = line.partition(":")
        fields.setdefault(route, set()).update(names.split())
    return fields


@pytest.mark.parametrize("name", NAMES)
def test_every_flag_is_in_the_section_of_flags(name: str):
    flags = flags_of(name)
    assert len(flags) == len(set(flags)) == NUMBERS_OF_FLAGS[name]
    assert sorted(set(flags) - in_backticks(sections(page_path(name))["Flags"])) == []


def test_every_variable_of_infinity_that_is_no_flag_has_a_row():
    variables = (LISTS / "infinity_variables.txt").read_text().split()
    section = sections(page_path("infinity"))["Flags"].partition("| variable without a flag |")[2]
    rows = re.findall(r"^\| (`[A-Z].*?`) \|", section, flags=re.M)
    assert sorted(re.findall(r"`(\w+)`", " ".join(rows))) == variables


def test_every_route_of_vllm_has_a_row():
    page = page_path("vllm").read_text().partition("## Flags")[0]
    listed = re.findall(r"^\| (`/.*?`) \|", page, flags=re.M)
    assert sorted(re.findall(r"`(/\S*?)`", " ".join(listed))) == sorted((LISTS / "vllm_routes.txt").read_text().split())


@pytest.mark.parametrize("name", NAMES)
def test_no_flag_is_listed_twice(name: str):
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


@pytest.mark.parametrize("name", NAMES)
def test_every_route_and_every_field_has_a_row(name: str):
    fields = fields_of(name)
    page = page_path(name).read_text()
    assert sorted(set(fields) - in_backticks(page)) == []
    rows = re.findall(r"^\| (`.*?`) \|", sections(page_path(name))["Request fields"], flags=re.M)
    assert sorted(set().union(*fields.values()) - in_backticks("\n".join(rows))) == []


@pytest.mark.parametrize("name", PAGES)
def test_lines_are_of_a_readable_length(name: str):
    assert [line for line in page_path(name).read_text().splitlines() if len(line) > LONGEST_LINE] == []
