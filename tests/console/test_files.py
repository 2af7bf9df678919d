"""The files of the console: what they may contain, how large they are, and that vendored ones are as published."""

import re
from hashlib import sha256
from pathlib import Path

import pytest

import trio_pool_serve
from trio_pool_serve.api.routes.console import console_files

pytestmark = pytest.mark.unit
FOLDER = Path(trio_pool_serve.__file__).parent / "console"

VENDORED = {
    "vendor/uPlot.iife.min.js": "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f",
    "vendor/uPlot.min.css": "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
    "vendor/uPlot.LICENSE": "8f989229699b4fe2f1a0432d0e9edc338a8a911e250e2d1b01ecd770a5f5b1bd",
}
"""uPlot 1.6.32, as published on npm: SHA-256."""

MAX_BYTES = 150_000
OWN = sorted(path for path in FOLDER.rglob("*.js") if path.parent.name != "vendor")

MARKUP = re.compile(
    r"innerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|srcdoc|createContextualFragment|setHTMLUnsafe"
)


@pytest.mark.parametrize("name", VENDORED)
def test_vendored_files_are_as_published(name):
    assert sha256((FOLDER / name).read_bytes()).hexdigest() == VENDORED[name]


def test_the_page_is_small_and_no_file_lies_in_the_folder_that_is_not_served():
    sizes = {name or "index.html": (FOLDER / (name or "index.html")).stat().st_size for name in console_files()}
    assert sum(sizes.values()) <= MAX_BYTES, sizes
    found = {str(path.relative_to(FOLDER)) for path in FOLDER.rglob("*") if path.is_file()}
    assert found - sizes.keys() == {"vendor/README.md", "vendor/uPlot.LICENSE"}


@pytest.mark.parametrize("path", OWN, ids=lambda path: path.name)
def test_scripts_write_texts_and_never_markup(path):
    assert not MARKUP.findall(path.read_text())


@pytest.mark.parametrize("path", [*OWN, FOLDER / "index.html", FOLDER / "console.css"], ids=lambda path: path.name)
def test_no_file_names_another_host(path):
    hosts = re.findall(r"(?:https?:)?//[a-z0-9.-]+\.[a-z]{2,}", re.sub(r"^\s*//.*$", "", path.read_text(), flags=re.M))
    assert set(hosts) <= {"http://www.w3.org"}  # the namespace of SVG


def test_scripts_and_styles_are_files_as_the_policy_wants_it():
    page = (FOLDER / "index.html").read_text()
    assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\son[a-z]+=|\sstyle=", page)
    assert "style=" not in re.sub(r"style:", "", page)
