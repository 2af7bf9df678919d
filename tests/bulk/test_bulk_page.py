"""The commands and examples of the page on bulk work are executed, in the order in which a reader does it."""

import ast
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pyarrow.dataset
import pyarrow.parquet
import pytest

from tests.models.model_families import WORDS, write_family
from tests.server.server_process import ROOT
from trio_pool_serve.bulk.bulk_options import RunOptions, TextOptions
from trio_pool_serve.bulk.run_table import _arguments
from trio_pool_serve.bulk.table_task import TABLE_TASKS, TaskOptions
from trio_pool_serve.cli import make_app
from trio_pool_serve.runs.tables.table_formats import format_of

PAGE = (ROOT / "docs/bulk.md").read_text()

EXAMPLES = dict(re.findall(r"^`(\w+\.py)`:\n```python\n(.*?)```", PAGE, re.M | re.S))

LINES = re.findall(r"^trio-pool-serve embed (.+) --model \S+(.*)$", PAGE, re.M)
"""Arguments before the model, and behind it."""

N_ROWS = 60


def executed(folder: Path, *command: str, **env: str) -> str:
    """Run Python in a folder; return what it prints."""
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = {**os.environ, "PYTHONPATH": paths, **env}
    ended = subprocess.run([sys.executable, *command], cwd=folder, env=env, capture_output=True, text=True, timeout=500)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def run_example(folder: Path, name: str, **env: str) -> object:
    """Run an example of the page; return what it prints."""
    return ast.literal_eval(executed(folder, "-c", EXAMPLES[name], **env))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the page's commands have been run, with a model of the tests in place of the page's."""
    folder = tmp_path_factory.mktemp("page")
    model = write_family(folder / "model", "bert")
    words = np.random.default_rng(0).choice(WORDS, (N_ROWS, 5))
    rows = {"id": range(100, 100 + N_ROWS), "text": [" ".join(of_row) for of_row in words]}
    pyarrow.parquet.write_table(pyarrow.table(rows), folder / "texts.parquet")
    assert len(LINES) == 3
    for before, behind in LINES:
        line = f"-m trio_pool_serve embed {before} --model {model} {behind} --device cpu --backend torch"
        executed(folder, *shlex.split(line))
    return folder


@pytest.fixture(scope="module")
def nearest(folder: Path) -> list[str]:
    """Ids of the three rows that are nearest to the first."""
    table = pyarrow.dataset.dataset(folder / "vectors.parquet").to_table()
    vectors = np.array(table["embedding"].to_pylist())
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    distances = 1 - vectors @ vectors[0]
    order = np.argsort(distances)[:4]
    assert np.diff(distances[order]).min() > 1e-5  # no example's rounding changes the order
    return [table["id"][int(row)].as_py() for row in order[:3]]


@pytest.mark.slow
def test_vectors_and_shards_have_all_rows(folder):
    assert run_example(folder, "read_vectors.py") == N_ROWS
    assert run_example(folder, "read_shards.py") == N_ROWS


@pytest.mark.slow
@pytest.mark.parametrize("modules", [("lancedb",), ("qdrant_client",), ("pgvector", "psycopg")])
def test_a_vector_database_finds_the_nearest_rows(folder, nearest, modules):
    for module in modules:
        pytest.importorskip(module, exc_type=ImportError)
    example = f"into_{modules[0].removesuffix('_client')}.py"
    if "psycopg" not in modules:
        assert run_example(folder, example) == nearest
        return
    if "PGHOST" not in os.environ:
        pytest.skip("PGHOST names no PostgreSQL server")
    with new_database() as name:
        assert run_example(folder, example, PGDATABASE=name) == nearest


@contextmanager
def new_database() -> Iterator[str]:
    import psycopg

    name = f"trio_pool_serve_test_{os.getpid()}"
    with psycopg.connect(dbname="postgres", autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}")
        try:
            yield name
        finally:
            connection.execute(f"DROP DATABASE {name} WITH (FORCE)")


def test_the_tables_of_options_are_those_of_the_commands():
    section = PAGE.partition("## Options")[2].partition("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("|")]
    listed = sorted(option for row in rows for option in re.findall(r"`(--[a-z-]+)`", row.split("|")[2]))
    arguments = [argument for name in TABLE_TASKS for argument in make_app()[name].assemble_argument_collection()]
    names = {argument.names[0] for argument in arguments if argument.names[0] not in ("*", "--IN", "--OUT")}
    assert listed == sorted(names)


def test_options_are_marked_that_a_run_compares():
    task = TaskOptions(task="embed", columns=("text",))
    formats = format_of("in.jsonl"), format_of("out.parquet")
    compared = _arguments(task, RunOptions(), TextOptions(), *formats)
    rows = [line.split("|") for line in PAGE.splitlines() if line.startswith("|") and line.endswith("| ✓ |")]
    marked = {option for row in rows for option in re.findall(r"`(--[a-z-]+)`", row[2])}
    columns = {"--query-column", "--document-column", "--documents-column"}  # compared as --column
    assert marked - columns == {name for name in compared if name.startswith("--")}
