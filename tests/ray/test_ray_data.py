"""Ray Data over a cluster of two nodes: rows that fail, and processes that are killed."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet
import pytest

from tests.models.model_families import HIDDEN, WORDS, write_family
from tests.server.server_process import ROOT
from trio_pool_serve.ray_data import BulkRuns, Embed

pytestmark = pytest.mark.ray

CPU: Any = {"model_dtype": "float32", "device": "cpu", "backend": "torch", "replicas": 1}

N_ROWS = 10_000
TOO_LONG, NULL, EMPTY = 1234, 5678, 9000

N_SHARDS, ROWS_PER_FILE = 2, 256


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_family(tmp_path_factory.mktemp("ray") / "model", "bert"))


def texts() -> list[str | None]:
    chosen = np.random.default_rng(0).choice(WORDS, (N_ROWS, 6))
    rows: list[str | None] = [" ".join(words) for words in chosen]
    rows[TOO_LONG], rows[NULL], rows[EMPTY] = "word " * 300, None, ""
    return rows


def actors() -> set[int]:
    """The processes of the actors that compute, in all clusters below this process."""
    found = set()
    for process in psutil.Process().children(recursive=True):
        try:
            command = process.cmdline()
        except psutil.Error:
            continue
        if command and command[0].startswith("ray::MapWorker(MapBatches("):
            found.add(process.pid)
    return found


def wait_until(is_so: Any) -> None:
    for _ in range(60_000):
        if is_so():
            return
        time.sleep(0.005)
    pytest.fail("has not come about within five minutes")


def computed_while_an_actor_is_killed(table: pa.Table, model: str) -> pa.Table:
    """Compute rows, kill an actor behind the first ones, and return all; the driver does."""
    import ray

    before = actors()
    computed = (
        ray.data.from_arrow(table)
        .repartition(20)
        .map_batches(
            Embed,
            fn_constructor_kwargs={"model": model, **CPU},
            compute=ray.data.ActorPoolStrategy(size=2),
            batch_size=64,
            batch_format="pyarrow",
        )
    )
    batches = iter(computed.iter_batches(batch_format="pyarrow", batch_size=256, prefetch_batches=0))
    done = [next(batches)]
    os.kill((actors() - before).pop(), signal.SIGKILL)
    return pa.concat_tables([*done, *batches])


@pytest.mark.slow
def test_an_actor_that_is_killed_costs_no_row_and_only_rows_that_cannot_be_computed_have_errors(driver, model):
    given = pa.table({"id": range(N_ROWS), "text": texts()})
    table = driver.run(computed_while_an_actor_is_killed, given, model).sort_by("id")
    assert table["id"].to_pylist() == list(range(N_ROWS))
    assert table["embedding"].type == pa.list_(pa.float32(), HIDDEN)
    errors = {row: error for row, error in enumerate(table["error"].to_pylist()) if error is not None}
    assert set(errors) == {TOO_LONG, NULL}
    assert "maximum context length" in errors[TOO_LONG]
    assert errors[NULL] == "The column 'text' is null."
    wait_until(lambda: not actors())  # none is left behind
    good = table.filter(pa.compute.is_null(table["error"]))
    local = Embed(model, **CPU)
    expected = vectors_of(local(good.select(["id", "text"])))
    local.close()
    assert np.abs(vectors_of(good) - expected).max() < 1e-6


def vectors_of(table: pa.Table) -> np.ndarray:
    column = table["embedding"].combine_chunks()
    assert column.null_count == 0
    return column.flatten().to_numpy().reshape(-1, HIDDEN)


# -- runs with a journal -------------------------------------------------------------------------------


RUNS: Any = {"command": "embed", "id_column": "id", "rows_per_file": ROWS_PER_FILE, **CPU}

PROGRAM = """
import json
import sys

import ray

from trio_pool_serve.ray_data import BulkRuns

address, options, rows, path = sys.argv[1:]
ray.init(address=address, log_to_driver=False)
done = ray.data.from_items(json.loads(rows), override_num_blocks=len(json.loads(rows))).map_batches(
    BulkRuns,
    fn_constructor_kwargs=json.loads(options),
    compute=ray.data.ActorPoolStrategy(size=2),
    batch_size=1,
)
rows = done.take_all()
with open(path, "w") as file:
    json.dump(rows, file)
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("source") / "texts.parquet"
    pa.parquet.write_table(pa.table({"id": range(N_ROWS), "text": texts()}), path)
    return path


@pytest.fixture(scope="module")
def uninterrupted(model: str, source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What runs write that nobody kills."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    runs = BulkRuns(model=model, **RUNS)
    done = runs(pa.Table.from_pylist(shards(source, folder)))
    runs.close()
    check(done.to_pylist())
    return folder


def shards(source: Path, folder: Path) -> list[dict[str, str]]:
    return [
        {"source": str(source), "target": str(folder / f"{number}.parquet"), "shard": f"{number}/{N_SHARDS}"}
        for number in range(1, N_SHARDS + 1)
    ]


def check(done: list[dict[str, Any]]) -> None:
    assert [row["error"] for row in done] == [None] * N_SHARDS
    assert (sum(row["rows"] for row in done), sum(row["failed"] for row in done)) == (N_ROWS, 2)


def files_in(folder: Path) -> dict[str, bytes]:
    found = [path for path in sorted(folder.rglob("*")) if path.is_file() and ".journal" not in path.name]
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}


def complete_parts(folder: Path) -> int:
    return len(list(folder.glob("*/part-?????.parquet")))


@contextmanager
def running(address: str, model: str, source: Path, folder: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """A driver, which does not outlive the block."""
    arguments = [address, json.dumps({"model": model, **RUNS}), json.dumps(shards(source, folder))]
    program = subprocess.Popen([sys.executable, "-c", PROGRAM, *arguments, str(folder / "done.json")], cwd=ROOT)
    try:
        yield program
    finally:
        program.kill()
        program.wait()


@pytest.mark.slow
def test_runs_whose_driver_is_killed_and_then_the_actors_of_the_next_are_completed_by_others(
    driver, model, source, uninterrupted, tmp_path
):
    def wait_for_more_than(parts: int) -> None:
        wait_until(lambda: complete_parts(tmp_path) > parts or program.poll() is not None)
        assert program.poll() is None
        assert complete_parts(tmp_path) < complete_parts(uninterrupted)

    with running(driver.address, model, source, tmp_path) as program:
        wait_for_more_than(2)
    wait_until(lambda: not actors())
    assert not (tmp_path / "done.json").exists()
    committed = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*/part-0000[01].parquet")}
    with running(driver.address, model, source, tmp_path) as program:
        wait_for_more_than(complete_parts(tmp_path))
        for actor in actors():
            os.kill(actor, signal.SIGKILL)
        assert program.wait(300) == 0
    check(json.loads((tmp_path / "done.json").read_text()))
    assert {path: path.stat().st_mtime_ns for path in committed} == committed  # not computed again
    (tmp_path / "done.json").unlink()
    assert files_in(tmp_path) == files_in(uninterrupted)
    tables = [pa.dataset.dataset(path).to_table() for path in tmp_path.glob("*.parquet")]
    ids = [row for table in tables for row in table["id"].to_pylist()]
    assert sorted(ids, key=int) == [str(number) for number in range(N_ROWS)]
