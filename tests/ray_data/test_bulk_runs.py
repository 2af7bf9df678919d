"""Runs with a journal, called as an actor calls them, without a cluster."""

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset
import pytest
import trio

from tests.bulk.test_commands import EMBED, ROWS, run, write_rows
from tests.models.model_families import write_family
from tests.ray_data.test_batch_tasks import CPU
from trio_pool_serve.errors import BulkInputError
from trio_pool_serve.ray_data import BulkRuns, bulk_runs

N_ROWS, FAILED = 700, 300

OPTIONS: Any = {"command": "embed", "truncate": True, "rows_per_file": 64, **CPU}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_family(tmp_path_factory.mktemp("runs") / "model", "bert"))


@pytest.fixture
def source(tmp_path: Path) -> Path:
    rows: list[dict[str, object]] = [{**ROWS[number % len(ROWS)], "id": number} for number in range(N_ROWS)]
    rows[FAILED]["text"] = 3
    return write_rows(tmp_path / "rows.jsonl", rows)


def computed(runs: BulkRuns, *rows: dict[str, Any]) -> list[dict[str, Any]]:
    return runs(pa.Table.from_pylist(list(rows))).to_pylist()


def test_runs_are_those_of_the_command_which_finds_them_complete(model, source, tmp_path):
    runs = BulkRuns(model=model, **OPTIONS)
    targets = {f"{n}/2": str(tmp_path / f"{n}.parquet") for n in (1, 2)}
    shards = [{"source": str(source), "target": target, "shard": shard} for shard, target in targets.items()]
    done = computed(runs, *shards)
    results = [(row["shard"], row["rows"], row["failed"], row["error"]) for row in done]
    assert results == [("1/2", 350, 1, None), ("2/2", 350, 0, None)]
    assert all(row["tokens"] > 350 for row in done)
    parts = {path: path.stat().st_mtime_ns for path in tmp_path.glob("?.parquet/*")}
    assert len(parts) == 12
    assert computed(runs, *shards) == done
    runs.close()
    options = {"model": model, "on_error": "null", "rows_per_file": 64}
    assert trio.run(lambda: run(source, tmp_path / "2.parquet", EMBED, shard="2/2", **options)) == 0
    assert {path: path.stat().st_mtime_ns for path in tmp_path.glob("?.parquet/*")} == parts
    tables = [pa.dataset.dataset(tmp_path / f"{n}.parquet").to_table() for n in (1, 2)]
    assert sorted(int(row) for table in tables for row in table["id"].to_pylist()) == list(range(N_ROWS))
    assert sum(table["embedding"].null_count for table in tables) == 1


def test_a_run_that_cannot_be_completed_has_an_error_and_others_go_on(model, source, tmp_path, monkeypatch):
    monkeypatch.setattr(bulk_runs, "IN_USE_PAUSES_S", (0.01,))
    held = tmp_path / "held.jsonl.journal"
    with closing(sqlite3.connect(held, isolation_level=None)) as holder:
        holder.execute("BEGIN EXCLUSIVE")
        runs = BulkRuns(model=model, **OPTIONS)
        rows: list[tuple[Any, Any, Any, str | None]] = [
            (tmp_path / "none.jsonl", "a.jsonl", None, "none.jsonl"),
            (source, "no/folder/a.jsonl", None, "does not exist"),
            (source, "held.jsonl", None, "Another run is writing this output"),
            (source, "a.jsonl", "3/2", "shards are numbered from 1 to 2"),
            (None, "a.jsonl", None, "source is None"),
            (source, source.name, None, "is the input"),
            (source, "good.jsonl", None, None),
        ]
        columns = (
            [of and str(of) for of, *_ in rows],
            [str(tmp_path / row[1]) for row in rows],
            [row[2] for row in rows],
        )
        done = runs(pa.table(columns, ["source", "target", "shard"])).to_pylist()
        runs.close()
    for row, (*_, reason) in zip(done, rows, strict=True):
        assert (reason is None) == (row["error"] is None), row
        assert reason is None or (reason in row["error"] and row["rows"] is None), row
    assert done[-1]["rows"] == N_ROWS


def test_values_that_python_has_not_are_errors_of_their_runs_and_others_go_on(model, source, tmp_path):
    not_a_path = pa.array([str(source).encode(), b"\xff", b"-"], pa.binary()).view(pa.string())
    sources = pa.DictionaryArray.from_arrays(pa.array([0, 1, 2, 9], pa.int32()), not_a_path, safe=False)
    runs = BulkRuns(model=model, **OPTIONS)
    targets = [str(tmp_path / f"{number}.jsonl") for number in range(len(sources))]
    done = runs(pa.table({"source": sources, "target": targets}))
    runs.close()
    errors = done["error"].to_pylist()
    assert errors[:3] == [None, "The value of the column 'source' is not UTF-8.", "source is '-', but must be a path."]
    assert errors[3].startswith("The value of the column 'source' cannot be read: ")
    assert done["rows"].to_pylist() == [N_ROWS, None, None, None]


def test_wrong_options_and_columns_are_refused(model):
    for wrong, kind, message in (
        ({"command": "embde"}, ValueError, "Unknown command 'embde'; accepted: embed, "),
        ({"columns": ("a", "b")}, ValueError, "embed takes 1"),
        ({"on_error": "stop"}, ValueError, "'on_error' must be in"),
        ({"shard": "1/2"}, TypeError, "Unknown option shard"),
    ):
        with pytest.raises(kind, match=message):
            BulkRuns(**{**OPTIONS, "model": model, **wrong})
    runs = BulkRuns(model=model, **OPTIONS)
    with pytest.raises(BulkInputError, match="No column 'target'"):
        computed(runs, {"source": "a"})
    runs.close()
