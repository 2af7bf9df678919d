"""Every request on the pages of docs/integrations gets a response of the shape that its product reads."""

import json
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from attrs import frozen

from tests.end_to_end.texts import API_KEY
from tests.page_blocks import Block, blocks_of
from tests.server.server_process import ROOT

PAGES = sorted((ROOT / "docs" / "integrations").glob("*.md"))
END = Block("", "", "")


@frozen
class Exchange:
    """A request of a page, and what stands below it: an example of the part of the response that is read."""

    page: str
    method: str
    path: str
    headers: Mapping[str, str]
    body: str
    read: Any

    @classmethod
    def of(cls, page: Path, request: Block, following: Block) -> "Exchange":
        head, _, body = request.text.partition("\n\n")
        first, *lines = head.splitlines()
        method, path = first.split()
        headers = dict(line.split(": ", 1) for line in lines)
        read = json.loads(following.text) if following.language == "json" else None
        return cls(page.stem, method, path, headers, body, read)


EXCHANGES = [
    Exchange.of(page, block, following)
    for page in PAGES
    for block, following in pairwise([*blocks_of(page), END])
    if block.language == "http"
]


EXACT = ("model_type", "object", "template", "query")
"""Members whose strings are as on the page; other strings are of the page's moment."""


def assert_read(found: Any, example: Any, place: str = "$") -> None:
    """Fail unless a response has what an example has: the same names, values of the same types, the same booleans."""
    if isinstance(example, dict):
        assert isinstance(found, dict), place
        for name, value in example.items():
            assert name in found, f"{place}.{name}"
            assert_read(found[name], value, f"{place}.{name}")
    elif isinstance(example, list):
        assert isinstance(found, list), place
        assert found, place
        for item in found:
            assert_read(item, example[0], f"{place}[]")
    elif isinstance(example, int | float) and not isinstance(example, bool):
        assert isinstance(found, int | float), place
        assert not isinstance(found, bool), place
    elif isinstance(example, bool) or place.rpartition(".")[2] in EXACT:
        assert found == example, place
    else:
        assert type(found) is type(example), place


@pytest.mark.parametrize("exchange", EXCHANGES, ids=lambda it: f"{it.page} {it.method} {it.path}")
def test_a_request_gets_what_its_product_reads(server_url: str, reranker_url: str, exchange: Exchange):
    base = reranker_url if exchange.headers.get("Host") == "127.0.0.1:8001" else server_url
    with httpx.Client(base_url=base, headers={"Authorization": f"Bearer {API_KEY}"}, timeout=60) as client:
        answer = client.request(exchange.method, exchange.path, content=exchange.body)
    assert answer.is_success, answer.text
    if exchange.read is not None:
        assert_read(answer.json(), exchange.read)


def test_every_page_says_what_to_enter_what_is_sent_and_what_to_watch_out_for():
    index = (ROOT / "docs" / "integrations" / "index.md").read_text()
    for page in PAGES:
        if page.stem == "index":
            continue
        text = page.read_text()
        assert f"({page.name})" in index, page.stem
        assert text.count("**Watch out.**") == 1, page.stem
        assert any(exchange.page == page.stem for exchange in EXCHANGES), page.stem


def test_settings_on_the_pages_can_be_read():
    read = 0
    for page in PAGES:
        for block in blocks_of(page):
            if block.language == "yaml":
                assert yaml.safe_load(block.text), page.stem
                read += 1
            elif block.language == "json5":
                assert json.loads(block.text), page.stem
                read += 1
    assert read == 3


def test_the_program_of_the_page_on_qdrant_prints_what_stands_below_it(server_url: str, capsys: pytest.CaptureFixture):
    program, printed, *_ = [block for block in blocks_of(ROOT / "docs/integrations/qdrant.md")
                            if block.language in ("python", "text")]  # fmt: skip
    text = program.text.replace("http://127.0.0.1:8000", server_url).replace("secret", API_KEY)
    exec(text, {"__name__": "__main__"})
    assert capsys.readouterr().out == printed.text
