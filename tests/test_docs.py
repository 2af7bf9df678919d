"""What the documents say is true: generated pages are up to date, examples run, links lead somewhere."""

import ast
import os
import re
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest
import trio

from tests.api.scripted_models import Judge, Labeller, serve_as
from tests.conftest import client_of, listening
from tests.models.classifier_families import write_classifier
from tests.models.model_families import pooling, write_family
from tests.server.server_process import ROOT, launched
from trio_pool_serve.api.dialects import DIALECTS
from trio_pool_serve.api.http.dispatch import endpoints_by_path
from trio_pool_serve.runner.copied_batch import CopiedBatch
from trio_pool_serve.tasks.pool import TASKS

PAGES = [page for folder in ("", "docs", "benchmarks") for page in sorted((ROOT / folder).glob("*.md"))]


def test_the_page_of_settings_is_that_of_the_classes():
    generator = runpy.run_path(str(ROOT / "docs" / "generate_settings.py"))
    assert (ROOT / "docs" / "settings.md").read_text() == generator["settings_page"]()


def test_the_page_of_agreement_is_that_of_the_record():
    generator = runpy.run_path(str(ROOT / "docs" / "generate_agreement.py"))
    assert (ROOT / "docs" / "agreement.md").read_text() == generator["agreement_page"]()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_names_of_files_lead_somewhere(page: Path):
    text = page.read_text()
    links = [link for link in re.findall(r"\]\(([^)#]+)", text) if "://" not in link]
    named = re.findall(r"`((?:tests|docs|benchmarks|scripts|trio_pool_serve)/[\w/]+\.\w+)`", text)
    missing = [link for link in links if not (page.parent / link).exists()]
    missing += [name for name in named if not (ROOT / name).exists()]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_page_has_a_hole(page: Path):
    assert not re.search(r"^(TODO|BENCHMARKS)|XXX", page.read_text(), flags=re.M)


def test_the_table_of_errors_is_that_of_the_code():
    from trio_pool_serve.api.http.error_responses import TABLE

    page = (ROOT / "docs" / "api.md").read_text()
    for status, kind in TABLE.values():
        assert re.search(rf"\| {status}[,\s|].*`{kind}`", page), kind


def sources_of(page: str) -> list[str]:
    """The Python examples of a page."""
    return re.findall(r"```python\n(.*?)```", (ROOT / "docs" / page).read_text(), flags=re.S)


def examples_of(page: str) -> list[dict]:
    """What each Python example of a page defines."""
    defined = []
    for block in sources_of(page):
        names: dict = {"__name__": page}
        exec(compile(block, page, "exec"), names)
        defined.append(names)
    return defined


def test_every_route_is_in_the_table_of_routes():
    page = (ROOT / "docs" / "api.md").read_text()
    for path in endpoints_by_path(DIALECTS):
        assert f"`{path}`" in page or f"`POST {path}`" in page, path


async def test_the_dialect_that_is_added_answers(service, monkeypatch):
    dialect, *_ = examples_of("extending.md")
    monkeypatch.setattr("trio_pool_serve.app.DIALECTS", (*DIALECTS, dialect["PLAIN"]))
    async with listening(service) as url, client_of(url) as client:
        answer = await client.post("/plain", json={"texts": ["hello", "hello world"]})
        assert [vector[0] for vector in answer.json()["vectors"]] == [3, 4]
        assert "render;dur" in answer.headers["Server-Timing"]
        for wrong, status in (
            ({"texts": []}, 400),
            ({"texts": 5}, 400),
            ({"texts": ["a"], "size": 9}, 400),
            ({"texts": ["a"], "model": "b"}, 404),
        ):
            answer = await client.post("/plain", json=wrong)
            assert (answer.status_code, list(answer.json())) == (status, ["sorry"])
            assert ("size must be from 1 to 8" in answer.text) == ("size" in wrong)
        assert "/plain" in (await client.get("/openapi.json")).json()["paths"]


async def test_the_task_that_is_added_is_done(service, scripted, monkeypatch):
    _, task, _ = examples_of("extending.md")
    monkeypatch.setattr("trio_pool_serve.tasks.pool.TASKS", {**TASKS, "uncertainty": task["UNCERTAINTY"]})
    serve_as(service, Labeller())
    scripted.on_launch = lambda batch: CopiedBatch([(np.array([0.5, 0.5], dtype=np.float32),)])
    async with listening(service) as url, client_of(url) as client:
        answer = await client.post("/pooling", json={"input": "hello", "task": "uncertainty"})
        assert answer.json()["data"][0]["data"] == pytest.approx([np.log(2)])
        serve_as(service, Judge())
        assert (await client.post("/pooling", json={"input": "hello", "task": "uncertainty"})).status_code == 400


EXTENDED = (sys.executable, "-m", "tests.server.programs.extended_server")


@pytest.mark.parametrize("engine", ["local", "process"])
async def test_what_is_added_is_served_wherever_models_compute(tmp_path, engine):
    embedding = write_family(tmp_path / "embedding", "bert", modules=[pooling("mean")])
    classifier = write_classifier(tmp_path / "classifier", "bert")
    for name, source in zip(("plain", "uncertainty", "spread"), sources_of("extending.md"), strict=True):
        (tmp_path / f"{name}.py").write_text(source)
    paths = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    async with (
        launched(
            tmp_path,
            f"e={embedding}",
            f"c={classifier}",
            *("--engine", engine, "--dtype", "float32"),
            *(("--replicas", "1") if engine == "process" else ()),
            command=EXTENDED,
            env={"PYTHONPATH": paths},
        ) as server,
        client_of(server.url) as client,
    ):

        async def pooled(**asked: object) -> list:
            answer = await client.post("/pooling", json={"input": ["Tasks have owners.", "a nursery"], **asked})
            assert answer.status_code == 200, answer.text
            return [item["data"] for item in answer.json()["data"]]

        answer = await client.post("/plain", json={"texts": ["Tasks have owners."]})
        assert len(answer.json()["vectors"]) == 1
        for uncertain, labels in zip(
            await pooled(model="c", task="uncertainty"), await pooled(model="c", task="classify"), strict=True
        ):
            assert uncertain == pytest.approx([-(np.array(labels) * np.log(labels)).sum()], rel=1e-5)
        for spread, vectors in zip(
            await pooled(task="spread"), await pooled(task="token_embed", normalize=False), strict=True
        ):
            assert spread == pytest.approx([np.array(vectors).var(axis=0).sum()], rel=1e-4)
        assert (await client.post("/pooling", json={"model": "c", "input": "a", "task": "spread"})).status_code == 400


async def test_the_python_example_of_the_readme_runs(tmp_path, minilm, monkeypatch, capsys):
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.S)
    assert "http://127.0.0.1:8000" in example
    async with launched(tmp_path, str(minilm), "--served-model-name", "all-MiniLM-L6-v2") as server:
        here = example.replace("http://127.0.0.1:8000", server.url)
        names: dict = {}
        await trio.to_thread.run_sync(lambda: exec(compile(here, "README.md", "exec"), names))
        names["client"].close()
    assert capsys.readouterr().out == "2 384\n"


QUESTIONS = re.findall(
    r"^\| (Where [^|]*\?) \| `([^`]+)` \| `([^`]+)` \|$", (ROOT / "docs/structure.md").read_text(), re.M
)


def test_the_questions_of_the_structure_page_have_their_answers():
    """Each names a file, and a class, function, method or constant that is defined there."""
    assert len(QUESTIONS) >= 10
    for question, file, name in QUESTIONS:
        body: list[ast.stmt] = ast.parse((ROOT / file).read_text()).body
        for part in name.split("."):
            (found,) = (node for node in body if part in _defined_by(node))
            body = getattr(found, "body", [])
        assert found, question


def _defined_by(node: ast.stmt) -> set[str]:
    match node:
        case ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef():
            return {node.name}
        case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
            return {name}
    return set()


def test_the_walk_through_one_request_has_at_most_twelve_steps():
    page = (ROOT / "docs/structure.md").read_text()
    walk = page.partition("## One request")[2].partition("\n## ")[0]
    assert 8 <= len(re.findall(r"^\d+\. ", walk, re.M)) <= 12


def test_every_file_that_the_structure_page_names_is_there():
    page = (ROOT / "docs/structure.md").read_text()
    named = re.findall(
        r"`((?:trio_pool_serve|api|app|benchmarks|engine|models|processes|rendering|runner|server|tasks|tests|threads)/[\w/]+\.py)`",
        page,
    )
    missing = [path for path in named if not any((ROOT / root / path).is_file() for root in ("", "trio_pool_serve"))]
    assert len(named) > 20
    assert missing == []
