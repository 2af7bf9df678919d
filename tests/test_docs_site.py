"""The documentation as a site: it builds, its links lead somewhere, and nothing on it comes from other hosts."""

import re
import runpy
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import partial
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from urllib.parse import unquote, urldefrag, urlsplit

import pytest
from attrs import Factory, define
from playwright.sync_api import sync_playwright

from tests.debian_programs import CHROMIUM_FLAGS, debian_program
from tests.server.server_process import ROOT

CONFIG = ROOT / "zensical.toml"
LOADED = {("script", "src"), ("img", "src"), ("link", "href"), ("iframe", "src"), ("source", "src")}
"""Attributes whose URLs a browser fetches by itself."""

NOT_PROSE = {"pre", "code", "table", "script", "style", "title"}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site from a copy of the pages: a build writes beside its sources."""
    folder = tmp_path_factory.mktemp("site")
    for file in (CONFIG, *ROOT.glob("*.md")):
        shutil.copy(file, folder)
    for name in ("docs", "benchmarks", "deploy"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "quick", "*.gz"))
    command = [sys.executable, str(folder / "docs/build_site.py")]
    built = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert built.returncode == 0, built.stdout + built.stderr
    return folder / "build/site"


def test_the_settings_of_mkdocs_are_generated_from_those_of_zensical():
    generator = runpy.run_path(str(ROOT / "docs/generate_mkdocs.py"))
    assert (ROOT / "mkdocs.yml").read_text() == generator["mkdocs_settings"]()


@define
class Page(HTMLParser):
    """What is checked of a page of the site."""

    anchors: set[str] = Factory(set)
    links: set[str] = Factory(set)
    loaded: set[str] = Factory(set)
    prose: list[str] = Factory(list)
    """Lines that are in no code and no table."""
    _outside_prose: int = 0

    def __attrs_pre_init__(self) -> None:
        super().__init__()

    @classmethod
    def of(cls, file: Path) -> "Page":
        page = cls()
        page.feed(file.read_text())
        return page

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("id", "name") and value:
                self.anchors.add(value)
            if tag == "a" and name == "href" and value:
                self.links.add(value)
            if (tag, name) in LOADED and value:
                self.loaded.add(value)
        self._outside_prose += tag in NOT_PROSE

    def handle_endtag(self, tag: str) -> None:
        self._outside_prose -= tag in NOT_PROSE

    def handle_data(self, data: str) -> None:
        if not self._outside_prose:
            self.prose += data.splitlines()


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Page]:
    return {file: Page.of(file) for file in site.rglob("*.html") if file.name != "404.html"}


def test_links_of_the_built_pages_lead_to_files_and_anchors(site, pages):
    broken = []
    for file, page in pages.items():
        for link in page.links | page.loaded:
            path, fragment = urldefrag(link)
            if urlsplit(path).scheme:
                continue
            target = (file.parent / unquote(path)).resolve() if path else file
            target = target / "index.html" if target.is_dir() else target
            known = target.is_relative_to(site) and target.is_file()
            if not known or (fragment and target in pages and unquote(fragment) not in pages[target].anchors):
                broken.append((str(file.relative_to(site)), link))
    assert broken == []
    assert len(pages) > 40


def test_built_pages_load_nothing_from_other_hosts(site, pages):
    loaded = set().union(*(page.loaded for page in pages.values()))
    assert [url for url in sorted(loaded) if urlsplit(url).netloc] == []
    for style in site.rglob("*.css"):
        assert re.findall(r"(?:url\(|@import)\s*['\"]?(?:https?:)?//", style.read_text()) == []


def test_no_table_and_no_list_is_shown_as_a_paragraph(site, pages):
    """A list or a table right below a paragraph is one on a code host, but not on the site."""
    shown = [
        (str(file.relative_to(site)), line)
        for file, page in pages.items()
        for line in page.prose
        if re.match(r"\s*([-*] |1\. |\||```)", line)
    ]
    assert shown == []


def entries(nav: list) -> Iterator[tuple[str, str]]:
    for (title, target), *_ in (list(item.items()) for item in nav):
        if isinstance(target, str):
            yield title, target
        else:
            yield from entries(target)


def test_each_page_is_once_in_the_navigation():
    in_nav = [target for _, target in entries(tomllib.loads(CONFIG.read_text())["project"]["nav"])]
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "benchmarks/README.md"]
    expected = sorted(str(page.relative_to(ROOT)) for page in [*pages, ROOT / "benchmarks/results/README.md"])
    assert sorted(in_nav) == expected


def test_the_index_links_every_page():
    """But for itself, and each product's page, which docs/integrations/index.md links."""
    index = ROOT / "docs/README.md"
    links = re.findall(r"\]\(([^)#]+)", index.read_text())
    linked = {(index.parent / link).resolve() for link in links} | {index, *ROOT.glob("docs/integrations/*.md")}
    nav = tomllib.loads(CONFIG.read_text())["project"]["nav"]
    assert [target for _, target in entries(nav) if (ROOT / target).resolve() not in linked] == []


@pytest.mark.slow
def test_a_browser_gets_all_of_a_page_from_the_site_and_finds_a_page_by_searching(site):
    handler = partial(SimpleHTTPRequestHandler, directory=str(site))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server, sync_playwright() as playwright:
        Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        browser = playwright.chromium.launch(executable_path=debian_program("chromium"), args=CHROMIUM_FLAGS)
        page = browser.new_page()
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        page.goto(f"{url}/docs/settings/", wait_until="networkidle")
        page.keyboard.press("/")
        page.keyboard.type("token budget")
        page.get_by_role("link", name=re.compile("Glossary")).first.wait_for()
        browser.close()
        server.shutdown()
    assert asked
    assert [each for each in asked if not each.startswith((url, "data:", "blob:"))] == []
