"""The programs of the page on Ray Data, executed as written but for the model."""

import re
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet
import pytest

from tests.bulk.test_bulk_page import executed
from tests.models.model_families import HIDDEN, WORDS, write_family
from tests.server.server_process import ROOT
from trio_pool_serve import EngineDeadError, ray_data
from trio_pool_serve.ray_data.actor_engine import EngineOptions

pytestmark = pytest.mark.ray

PAGE = (ROOT / "docs/ray.md").read_text()

PROGRAMS = dict(re.findall(r"^`(\w+\.py)`:\n```python\n(.*?)```", PAGE, re.M | re.S))

N_ROWS = 100


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("page")
    write_family(folder / "model", "bert")
    words = np.random.default_rng(0).choice(WORDS, (N_ROWS, 4))
    rows = {"id": range(N_ROWS), "text": [" ".join(of_row) for of_row in words]}
    pyarrow.parquet.write_table(pa.table(rows), folder / "texts.parquet")
    return folder


def printed(folder: Path, name: str, address: str) -> str:
    program = PROGRAMS[name].replace("sentence-transformers/all-MiniLM-L6-v2", str(folder / "model"))
    assert str(folder) in program
    return executed(folder, "-c", program, RAY_ADDRESS=address, RAY_USAGE_STATS_ENABLED="0")


@pytest.mark.slow
def test_a_data_set_is_embedded_into_parquet(driver, folder):
    assert "['id', 'text', 'embedding', 'error']" in printed(folder, "embed_texts.py", driver.address)
    vectors = pa.dataset.dataset(folder / "vectors").to_table()
    assert sorted(vectors["id"].to_pylist()) == list(range(N_ROWS))
    assert vectors.schema.field("embedding").type == pa.list_(pa.float32(), HIDDEN)
    assert vectors["error"].null_count == N_ROWS


@pytest.mark.slow
def test_files_are_computed_in_runs_which_a_second_program_finds_complete(driver, folder):
    for _ in range(2):
        lines = printed(folder, "embed_files.py", driver.address).splitlines()
        lines = sorted(line for line in lines if line.startswith(str(folder)))
        assert lines == [f"{folder}/files/{number}.parquet {N_ROWS // 4} 0 None" for number in (1, 2, 3, 4)]
    tables = [pa.dataset.dataset(path).to_table() for path in (folder / "files").glob("*.parquet")]
    assert sorted(int(row) for table in tables for row in table["id"].to_pylist()) == list(range(N_ROWS))


def retried_errors(program: str) -> object:
    import ray

    context = ray.data.DataContext.get_current()
    before = context.actor_task_retry_on_errors
    try:
        exec(program, {})
        return context.actor_task_retry_on_errors
    finally:
        context.actor_task_retry_on_errors = before


@pytest.mark.slow
def test_calls_can_be_repeated_after_an_engine_has_died(driver):
    (program,) = [found for found in re.findall(r"```python\n(.*?)```", PAGE, re.S) if "retry_on_errors" in found]
    assert driver.run(retried_errors, program) == [EngineDeadError]


def test_the_page_has_every_class_and_option():
    for name in (*ray_data.__all__, *EngineOptions.__annotations__):
        assert f"`{name}`" in PAGE, name
