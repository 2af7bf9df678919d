"""The pages about moving from other servers: their examples run, and the flags that they name exist."""

import re
from pathlib import Path

import attrs
import pytest

from tests.compatibility.tei_record import RECORD
from tests.compatibility.worked_example import SECTIONS, WorkedExample, first_cells, sections
from tests.server.server_process import ROOT
from trio_pool_serve.config import Config

PAGES = sorted((ROOT / "docs").glob("migrate-from-*.md"))
MODEL = "sentence-transformers/all-MiniLM-L6-v2"
"""The model of the examples, which is packaged."""

OURS = {"--config"} | {
    f"--{prefix}{field.name.replace('_', '-')}"
    for group in attrs.fields(Config)
    if attrs.has(group.type)
    for field in attrs.fields(group.type)
    for prefix in ("", "no-")
}
"""Every flag that this server has, and its negation."""


def test_there_are_pages():
    assert ROOT / "docs" / "migrate-from-tei.md" in PAGES


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_has_its_four_sections(page: Path):
    assert [*sections(page)] == SECTIONS


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_flags_that_a_page_offers_exist(page: Path):
    rows = re.findall(r"^\| `.*?` \| (.*?) \|", sections(page)["Flags"], flags=re.M)
    offered = {flag for row in rows for flag in re.findall(r"`(--[\w-]+)", row)}
    offered |= {word for word in WorkedExample.of(page).command if word.startswith("--")}
    assert offered
    assert not offered - OURS


def test_every_flag_and_variable_and_field_of_tei_is_on_its_page():
    page = sections(ROOT / "docs" / "migrate-from-tei.md")
    flags = " ".join(first_cells(page["Flags"]))
    assert [name for name in [*RECORD["flags"], *RECORD["variables"]] if f"`{name}`" not in flags] == []
    fields = {name.partition(".")[0] for route in RECORD["routes"].values() for name in route["fields"]}
    listed = " ".join(first_cells(page["Request fields"]))
    assert [name for name in sorted(fields) if f"`{name}`" not in listed] == []


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_example_of_a_page_runs(page: Path, minilm: Path, tmp_path: Path):
    example = WorkedExample.of(page)
    assert MODEL in example.command, "the example's model is the one that the tests have"
    with example.running({MODEL: minilm}, tmp_path / "server.log") as server:
        example.wait_healthy(server)
        example.probe(server)
        assert example.run_client(server) == example.printed
