"""The examples of the pages that use a server run as they stand there, and print what stands below them."""

import gc
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import redirect_stdout
from importlib.metadata import packages_distributions
from io import StringIO
from itertools import pairwise
from typing import Any

import pytest
import requests
import voyageai
from huggingface_hub import close_session
from packaging.utils import canonicalize_name

from tests.end_to_end.test_clients_litellm import PYTHON as LITELLM_PYTHON
from tests.end_to_end.texts import API_KEY
from tests.page_blocks import Block, blocks_of
from tests.server.server_process import ROOT

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
"""Programs leave the closing of their clients' sockets to their end."""

BLOCKS = [
    *blocks_of(ROOT / "docs/clients.md"), *blocks_of(ROOT / "docs/structured-concurrency.md"), Block("", "", ""),
]  # fmt: skip
EXAMPLES = [(block, following.text if following.language == "text" else None)
            for block, following in pairwise(BLOCKS) if block.language != "text"]  # fmt: skip
SERVER, *EXAMPLES = EXAMPLES


@pytest.fixture(scope="module")
def moved(server_url: str, reranker_url: str) -> Iterator[Mapping[str, str]]:
    """What stands for the addresses and the key of the page."""
    with requests.Session() as session:  # voyageai and huggingface_hub keep one for all clients, which nothing closes
        voyageai.requestssession = session
        yield {"http://127.0.0.1:8000": server_url, "http://127.0.0.1:8001": reranker_url, "secret": API_KEY}
        voyageai.requestssession = None
        close_session()


def name_of(block: Block) -> str:
    imported = re.findall(r"^(?:from|import) (\w+)", block.text, flags=re.M)
    return "-".join([block.language, *imported])


def printed_by(program: str, language: str) -> str:
    """Run a program; Python's in this process, which has most of the libraries already."""
    if language == "python" and "litellm" not in program:
        with redirect_stdout(StringIO()) as printed:
            exec(program, {"__name__": "__main__"})
        gc.collect()  # closes what the program has left open, as its end would
        return printed.getvalue()
    if language == "python":
        if not LITELLM_PYTHON.exists():
            pytest.skip("scripts/test makes litellm's environment")
        command = [str(LITELLM_PYTHON), "-c", program]
    elif language == "javascript":
        if shutil.which("node") is None:
            pytest.skip("node is not installed")
        command = ["node", "--input-type=module", "--eval", program]
    else:
        command = ["bash", "-ec", program]
    env = {**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}  # otherwise litellm fetches prices when it is imported
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(("block", "printed"), EXAMPLES, ids=[name_of(block) for block, _ in EXAMPLES])
def test_an_example_prints_what_stands_below_it(moved, block, printed):
    program = block.text
    for old, new in moved.items():
        program = program.replace(old, new)
    found = printed_by(program, block.language)
    assert printed is None or found == printed


SECTIONS = [
    section
    for section in re.split(r"^## ", (ROOT / "docs/clients.md").read_text(), flags=re.M)
    if "```python" in section
]


@pytest.mark.parametrize("section", SECTIONS, ids=[section.partition("\n")[0] for section in SECTIONS])
def test_a_client_has_one_line_that_installs_all_that_its_examples_import(section: str):
    (line,) = re.findall(r"^.*`pip install .*$", section, flags=re.M)
    installed = {canonicalize_name(name) for name in re.findall(r"[\w-]+", line.partition("pip install")[2])}
    imported = set(re.findall(r"^(?:from|import) (\w+)", section, flags=re.M)) - sys.stdlib_module_names
    for module in imported:
        providers = packages_distributions().get(module, [module])  # litellm has an environment of its own
        assert installed & {canonicalize_name(provider) for provider in providers}, module


def test_the_models_and_the_key_of_the_page_are_those_of_its_server():
    command = SERVER[0].text
    assert set(re.findall(r"(\w+)=", command)) == {"minilm", "reranker"}
    assert command.rstrip().endswith("--api-key secret")


API_PAGE = [
    example
    for block in blocks_of(ROOT / "docs/api.md")
    for example in re.findall(r"^# ([^{\[].*)\n(curl (?:.|\n)*?)\n# ([{\[].*)\n", block.text, flags=re.M)
]
"""The examples of one request of each API: title, command and response."""


def test_the_page_of_the_api_shows_a_response_to_every_request():
    blocks = "".join(block.text for block in blocks_of(ROOT / "docs/api.md"))
    assert len(API_PAGE) == len(re.findall(r"^curl ", blocks, flags=re.M)) >= 18


@pytest.mark.parametrize(("title", "command", "shown"), API_PAGE, ids=[title for title, *_ in API_PAGE])
def test_a_request_of_the_page_of_the_api_returns_what_the_page_shows(
    server_url: str, title: str, command: str, shown: str
):
    program = command.replace("http://127.0.0.1:8000", server_url).replace("all-MiniLM-L6-v2", "minilm")
    program = program.replace("curl -sS", f"curl -sS -H 'Authorization: Bearer {API_KEY}'")
    expected = re.sub(r", …(?=[\]}])", ', "…"', shown.replace("all-MiniLM-L6-v2", "minilm"))
    expected = re.sub(r'"…"(?=})', '"…": 0', expected)
    assert_shows(json.loads(printed_by(program, "sh")), json.loads(expected))


def assert_shows(found: Any, shown: Any) -> None:
    """Compare a response with a shortened one, in which ``…`` stands for further items or fields."""
    match shown:
        case dict():
            assert found.keys() == shown.keys() or ("…" in shown and found.keys() >= shown.keys() - {"…"})
            for name in shown.keys() - {"…"}:
                assert_shows(found[name], shown[name])
        case [*items, "…"]:
            assert len(found) > len(items)
            for one, other in zip(found, items, strict=False):
                assert_shows(one, other)
        case list():
            assert len(found) == len(shown)
            for one, other in zip(found, shown, strict=True):
                assert_shows(one, other)
        case float():
            assert found == pytest.approx(shown, abs=0.005)
        case _:
            assert found == shown
