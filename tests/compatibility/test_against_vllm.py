"""Requests for vLLM get the answers that vLLM gives, but for the differences that the cases declare.

What both answer is written to docs/compared-with-vllm.json by ``--write-compared``, from which
docs/generate_compared_with_vllm.py makes a page. Without that option the tests compare with what is written there.
"""

import json
import runpy
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.compatibility.http_answer import answer_of, request_of
from tests.compatibility.vllm_cases import CASES, LINES, cases_of, key_of
from tests.compatibility.vllm_comparison import differences, summary
from tests.compatibility.vllm_folders import KINDS
from tests.conftest import client_of, listening, render_templates_on_the_loop, running
from tests.lanes import sampled
from trio_pool_serve.cli import read_config
from trio_pool_serve.service import Service

RECORD = json.loads((Path(__file__).parent / "vllm_answers.json").read_text())
DOCS = Path(__file__).parents[2] / "docs"
PAGE_DATA = DOCS / "compared-with-vllm.json"
KEYS = {key_of(kind, case) for kind in KINDS for case in cases_of(kind)}


@pytest.fixture(scope="module")
def known(request: pytest.FixtureRequest) -> Iterator[dict[str, str]]:
    """What this server is known to answer, by key; with ``--write-compared`` what the tests see."""
    if not request.config.getoption("--write-compared"):
        rows = json.loads(PAGE_DATA.read_text())["rows"]
        yield {key: ours for row in rows for key, _, ours in row["answers"]}
        return
    seen: dict[str, str] = {}
    yield seen
    assert seen.keys() == KEYS, "not all kinds of model were tested"
    PAGE_DATA.write_text(page_data(seen))


def page_data(seen: dict[str, str]) -> str:
    """Return what the page is made from: of each case the answers of both, by kind of model, in a line of JSON."""
    rows = [
        {
            "line": line,
            "request": f"{case.method} {case.path}",
            "with": case.name,
            "reason": case.reason,
            "kinds": case.kinds,
            "answers": [
                (key, summary(RECORD["answers"][key]), seen[key]) for key in (key_of(kind, case) for kind in case.kinds)
            ],
        }
        for line, cases in LINES.items()
        for case in cases
    ]
    lines = ",\n  ".join(json.dumps(row, ensure_ascii=False) for row in rows)
    return f'{{\n "version": {json.dumps(RECORD["vllm"])},\n "rows": [\n  {lines}\n ]\n}}\n'


def test_every_case_is_recorded():
    assert set(RECORD["answers"]) == KEYS
    assert len(KEYS) == sum(len(case.kinds) for case in CASES), "two cases have the same name"


@sampled("kind", KINDS, keep=["embedding", "cross-encoder", "sparse", "chat", "chat with another template"])
async def test_answers_are_those_of_vllm(request, kind: str, tmp_path: Path, subtests: pytest.Subtests, known):
    folder = KINDS[kind].write(tmp_path / "model")
    flags = ("--dtype", "float32", "--device", "cpu", "--backend", "torch")  # torch needs no conversion
    config = read_config([f"m={folder}", *flags, *KINDS[kind].both, *KINDS[kind].ours])
    async with running(Service(config)) as service, listening(service) as url, client_of(url) as client:
        render_templates_on_the_loop(service)
        for case in cases_of(kind):
            key = key_of(kind, case)
            theirs, ours = RECORD["answers"][key], answer_of(await client.request(**request_of(case)))
            with subtests.test(key):
                found = differences(case, theirs, ours)
                assert not found
                allowed = differences(case, theirs, ours, is_strict=True)
                assert bool(allowed) == bool(case.reason), "the answers do not differ any more"
                if request.config.getoption("--write-compared"):
                    known[key] = summary(ours)
                assert known[key] == summary(ours)


def test_the_page_is_that_of_the_record_and_of_what_was_seen():
    generator = runpy.run_path(str(DOCS / "generate_compared_with_vllm.py"))
    assert (DOCS / "compared-with-vllm.md").read_text() == generator["page"]()
