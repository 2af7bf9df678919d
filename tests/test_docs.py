"""What the documents say is true: generated pages are up to date, examples run, links lead somewhere."""

import ast
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import trio

from tests.conftest import client_of
from tests.lanes import sampled
from tests.models.classifier_families import write_classifier
from tests.models.model_families import pooling, write_family
from tests.server.server_process import ROOT, launched
from trio_pool_serve.api.dialects import DIALECTS
from trio_pool_serve.api.http.endpoint_choice import endpoints_by_path
from trio_pool_serve.api.http.error_responses import TABLE
from trio_pool_serve.api.routes.console import console_files
from trio_pool_serve.api.routes.openapi import ASSETS
from trio_pool_serve.api.routes.operations import DRAIN_PATH, HOSTS_PATH
from trio_pool_serve.app import create_app
from trio_pool_serve.config import Config, ModelChangesConfig

OTHER_SERVERS = ("migrate-from-", "compared-with-")
FLAGS_OF_OTHER_PROGRAMS = {
    "--api-server-count", "--build-arg", "--extra-index-url", "--ipc", "--num-cpus", "--platform", "--ssl-",
    "--stop-server", "--strict",
}  # fmt: skip
"""vLLM's, docker's, pip's, Ray's, kubeconform's and a benchmark's; and the beginning of several of this server."""

PACKAGE = ROOT / "trio_pool_serve"
FOLDERS = {path.name for root in (ROOT, PACKAGE) for path in root.iterdir() if path.is_dir() and path.name[0].isalpha()}

PAGES = [
    page for folder in ("", "docs", "docs/integrations", "benchmarks") for page in sorted((ROOT / folder).glob("*.md"))
]


@pytest.mark.parametrize(
    "page", ["settings", "agreement", "cpu-backends", "gpu-launches", "metrics", "routes", "fields", "published-models"]
)
def test_a_generated_page_is_what_its_generator_writes(page: str):
    name = page.replace("-", "_")
    generator = runpy.run_path(str(ROOT / f"docs/generate_{name}.py"))
    assert (ROOT / f"docs/{page}.md").read_text() == generator[f"{name}_page"](), f"run docs/generate_{name}.py"


@pytest.mark.parametrize("name", ["quality", "quality_fp8"])
def test_the_page_on_quality_has_the_table_of_the_results(name: str):
    results = (ROOT / "benchmarks" / "results" / f"{name}.md").read_text()
    (table,) = re.findall(r"(?:^\|.*\n)+", results, re.M)
    assert table in (ROOT / "docs" / "quality.md").read_text()


def test_the_page_of_the_command_line_is_generated_from_its_help():
    # In a process of its own: cyclopts takes a part of `python -m pytest` for arguments of the commands.
    program = "import runpy; print(runpy.run_path('docs/generate_cli.py')['cli_page'](), end='')"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert (ROOT / "docs" / "cli.md").read_text() == done.stdout


def test_the_page_of_routes_has_the_routes_of_an_app(scripted_folder):
    config = Config(models=(str(scripted_folder),), model_changes=ModelChangesConfig(model_api=True))
    served = set(create_app(config).routes.routes)
    rows = re.findall(r"^\| `(?:(\w+) )?(/\S*)` \|", (ROOT / "docs" / "routes.md").read_text(), re.M)
    listed = {(method or "POST", path) for method, path in rows}
    of_pages = {("GET", f"/docs/{asset}") for asset in ASSETS} | {
        ("GET", f"/console/{name}") for name in console_files() if name
    }
    assert served - listed == of_pages
    assert listed - served == {("GET", HOSTS_PATH), ("POST", HOSTS_PATH), ("POST", DRAIN_PATH)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_names_of_files_lead_somewhere_and_nothing_is_left_to_write(page: Path):
    text = page.read_text()
    links = [link for link in re.findall(r"\]\(([^)#]+)", text) if "://" not in link]
    named = re.findall(rf"`((?:{'|'.join(FOLDERS)})/[\w/]+\.\w+)`", text)
    missing = [link for link in links if not (page.parent / link).exists()]
    missing += [name for name in named if not any((root / name).exists() for root in (ROOT, PACKAGE))]
    assert not missing
    assert not re.search(r"^(TODO|BENCHMARKS)|XXX", text, flags=re.M), "a hole"


def test_every_flag_that_a_page_names_is_one_of_a_command():
    """On the pages about other servers other tests check it, and results and changes are of their time."""
    known = set(re.findall(r"--[a-z][\w-]*", (ROOT / "docs" / "cli.md").read_text()))
    known |= set(re.findall(r"^\| `(--[\w-]+)` \|", (ROOT / "docs" / "settings.md").read_text(), flags=re.M)) | {
        "--help-all"
    }
    known |= {f"--no-{flag[2:]}" for flag in known} | FLAGS_OF_OTHER_PROGRAMS
    pages = [ROOT / "README.md", ROOT / "SECURITY.md", *(ROOT / "docs").rglob("*.md")]
    unknown = {}
    for page in pages:
        prose = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
        code = " ".join(re.findall(r"`(--[^`]+)`", prose))
        unknown[page.name] = set(re.findall(r"(?<![\w-])--[a-z][\w-]*", code)) - known
    assert {name: flags for name, flags in unknown.items() if flags and not name.startswith(OTHER_SERVERS)} == {}


def test_the_page_of_the_api_has_every_error_and_every_route():
    page = (ROOT / "docs" / "api.md").read_text()
    for status, kind in TABLE.values():
        assert re.search(rf"\| {status}[,\s|].*`{kind}`", page), kind
    for path in endpoints_by_path(DIALECTS):
        assert f"`{path}`" in page or f"`POST {path}`" in page, path


EXTENSIONS = dict(
    re.findall(r"^`([\w/]+\.py)`:\n```python\n(.*?)```", (ROOT / "docs/extending.md").read_text(), re.M | re.S)
)
"""The examples of the page on extending the server, by their file names."""


def write_extensions(folder: Path) -> None:
    for name, source in EXTENSIONS.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(source)


@pytest.mark.parametrize(
    "check",
    [("ruff", "check"), ("ruff", "format", "--check"), pytest.param(("mypy",), marks=pytest.mark.slow)],
    ids=" ".join,
)
def test_the_examples_of_extensions_pass_the_checks_of_this_repository(tmp_path: Path, check: tuple[str, ...]):
    write_extensions(tmp_path)
    settings = f"--config{'-file' if check == ('mypy',) else ''}={ROOT / 'pyproject.toml'}"
    command = [sys.executable, "-m", *check, settings, str(tmp_path)]
    env = {**os.environ, "MYPYPATH": str(tmp_path)}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@sampled("processes", [("local", "1"), ("process", "2")], keep=[("local", "1")], ids="-".join)
async def test_plugins_add_a_dialect_a_route_a_task_and_a_kind_of_model(tmp_path, processes):
    engine, workers = processes
    spread = write_family(tmp_path / "with-spread", "bert", modules=[pooling("mean")])
    (spread / "spread.json").write_text("{}")
    classifier = write_classifier(tmp_path / "classifier", "bert")
    write_extensions(tmp_path)
    paths = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    async with (
        launched(
            tmp_path,
            f"s={spread}",
            f"c={classifier}",
            *("--engine", engine, "--api-workers", workers, "--dtype", "float32"),
            *("--plugins", "plain,hello,uncertainty,spread", "--api-key", "secret", "--max-inputs-per-request", "2"),
            env={"PYTHONPATH": paths},
        ) as server,
        client_of(server.url) as client,
    ):
        assert (await client.get("/hello")).status_code == 401
        client.headers["Authorization"] = "Bearer secret"

        async def pooled(**fields: object) -> list:
            answer = await client.post("/pooling", json={"input": ["Tasks have owners.", "a nursery"], **fields})
            assert answer.status_code == 200, answer.text
            return [item["data"] for item in answer.json()["data"]]

        assert (await client.get("/hello")).json() == {"hello": "you"}
        vectors = (await client.post("/plain", json={"texts": ["hello", "hello world"]})).json()["vectors"]
        expected = await client.post("/v1/embeddings", json={"input": ["hello", "hello world"]})
        assert vectors == [pytest.approx(row["embedding"]) for row in expected.json()["data"]]
        refused = await client.post("/plain", json={"texts": []})
        assert (refused.status_code, refused.json()) == (400, {"sorry": "texts is empty."})
        refused = await client.post("/plain", json={"texts": ["hello"] * 3})
        assert refused.status_code == 400
        assert refused.json()["sorry"].startswith("texts has 3 inputs; the limit is 2")
        refused = await client.post("/plain", json={"texts": ["hello"], "size": 99999})
        assert refused.json()["sorry"].startswith("size must be from 1 to ")

        for uncertain, labels in zip(
            await pooled(model="c", task="uncertainty"), await pooled(model="c", task="classify"), strict=True
        ):
            assert uncertain == pytest.approx([-(np.array(labels) * np.log(labels)).sum()], rel=1e-5)
        for measured, states in zip(
            await pooled(task="spread"), await pooled(task="token_embed", normalize=False), strict=True
        ):
            assert measured == pytest.approx([np.array(states).var(axis=0).sum()], rel=1e-4)
        for model, task in (("c", "spread"), ("s", "uncertainty")):
            refused = await client.post("/pooling", json={"model": model, "input": "a", "task": task})
            assert refused.status_code == 400, refused.text


def test_contributors_are_told_to_read_the_smallest_dialect_first():
    modules = [path for path in (PACKAGE / "api" / "dialects").glob("*.py") if path.name != "__init__.py"]
    smallest = min(modules, key=lambda path: len(path.read_text().splitlines()))
    assert f"read `{smallest.name}` first" in (ROOT / "CONTRIBUTING.md").read_text()


async def test_a_plugin_that_cannot_be_imported_is_said_in_one_line(tmp_path):
    command = [sys.executable, "-m", "trio_pool_serve", "serve", str(tmp_path), "--plugins", "not_there"]
    ended = await trio.run_process(command, capture_stderr=True, check=False)
    assert ended.returncode == 2
    assert b"--plugins: not_there cannot be imported: ModuleNotFoundError" in ended.stderr
    assert b"Traceback" not in ended.stderr


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


TERMS = re.findall(
    r"^\| ([^|]+) \| ([^|]+) \| (`[^|]+\.py`) \| [^|]+ \|$", (ROOT / "docs/glossary.md").read_text(), re.M
)


def test_the_file_of_a_term_defines_what_its_meaning_names():
    assert len(TERMS) >= 100
    for term, meaning, files in TERMS:
        names = {part for each in re.findall(r"`([\w.]+)`", f"{term} {meaning}") for part in each.split(".")}
        for file in re.findall(r"`([^`]+)`", files):
            tree = ast.walk(ast.parse((PACKAGE / file).read_text()))
            defined = set().union(*(_defined_by(node) for node in tree if isinstance(node, ast.stmt)))
            assert names & defined, f"{term}: {file}"


def _defined_by(node: ast.stmt) -> set[str]:
    match node:
        case ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef():
            return {node.name}
        case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
            return {name}
    return set()


def test_the_tests_that_security_md_names_exist():
    path, missing = "", []
    for named, test in re.findall(r"`([\w/]*(?:\.py)?)::(test_\w+)`", (ROOT / "SECURITY.md").read_text()):
        path = named or path
        if f"def {test}(" not in (ROOT / "tests" / path).read_text():
            missing.append(f"{path}::{test}")
    assert path
    assert missing == []


def test_few_sentences_match_a_pattern_that_readers_stumble_over():
    """False positives of the patterns; ``python scripts/plain_english.py`` prints them, for someone to look at."""
    matches = runpy.run_path(str(ROOT / "scripts/plain_english.py"))["matches"]()
    assert len(matches) <= 15, matches
