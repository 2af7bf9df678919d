"""The commands for files, with real models: in this process, and by a real server."""

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest
from attrs import evolve

from tests.end_to_end.folder_over_http import WHOLE, farthest, in_order, serving_folder
from tests.models.classifier_families import write_classifier
from tests.models.model_families import TEXTS, edit_weights, pooling, write_family
from tests.models.retrieval_families import pylate_bert, splade_max
from tests.server.server_process import ROOT
from trio_pool_serve.bulk.bulk_options import OwnModelOptions, RunOptions, TextOptions
from trio_pool_serve.bulk.own_engine import ROWS_PER_JOB
from trio_pool_serve.bulk.run_table import ROWS_FAILED, run_command
from trio_pool_serve.bulk.table_task import TaskOptions
from trio_pool_serve.runs.tables import input_table

OWN = OwnModelOptions(model_dtype="float32", device="cpu", backend="torch")

WORDS = [text for text in TEXTS if text.strip()]

ROWS = [
    {"id": f"r{index}", "text": text, "query": WORDS[0], "document": text, "documents": WORDS[: 1 + index % 4]}
    for index, text in enumerate(WORDS)
]


def write_rows(path: Path, rows: Sequence[object] = ROWS) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read_rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


async def run(
    source: Path, target: Path, task: TaskOptions, *, truncate: bool = True, own: OwnModelOptions = OWN, **options: Any
) -> int:
    return await run_command(str(source), str(target), task, RunOptions(**options), TextOptions(truncate=truncate), own)


EMBED = TaskOptions(task="embed", columns=("text",))


classifier, scorer = (partial(write_classifier, name="bert", num_labels=labels) for labels in (3, 1))

CASES = [
    (EMBED, partial(write_family, name="bert"), "embedding"),
    (TaskOptions(task="token-embed", columns=("text",)), pylate_bert, "embeddings"),
    (TaskOptions(task="sparse", columns=("text",)), splade_max, "sparse_embedding"),
    (TaskOptions(task="classify", columns=("text",)), classifier, "probabilities"),
    (TaskOptions(task="score", columns=("query", "document")), scorer, "score"),
    (TaskOptions(task="rerank", columns=("query", "documents"), top_n=2), scorer, "results"),
]


@pytest.mark.parametrize(("task", "write", "column"), CASES, ids=[case[0].task for case in CASES])
async def test_each_command_gives_what_the_server_gives(
    tmp_path: Path, task: TaskOptions, write: Callable[[Path], Path], column: str
):
    model, rows = write(tmp_path / "model"), write_rows(tmp_path / "rows.jsonl")
    async with serving_folder(model) as asked:
        assert await run(rows, tmp_path / "own.jsonl", task, model=str(model)) == 0
        assert await run(rows, tmp_path / "remote.jsonl", task, url=str(asked.client.base_url)) == 0
        own, remote = read_rows(tmp_path / "own.jsonl"), read_rows(tmp_path / "remote.jsonl")
        assert [row["id"] for row in own] == [row["id"] for row in remote] == [row["id"] for row in ROWS]
        expected = await VALUES[task.task](asked, task)
    for results in (own, remote):
        if task.task in ("sparse", "rerank"):
            indices = [[item["index"] for item in row[column]] for row in results]
            assert indices == [[int(index) for index in row[0]] for row in expected]
            numbers = [[item["score"] for item in row[column]] for row in results]
            assert farthest(numbers, [row[1] for row in expected]) < 1e-5
        else:
            assert farthest([row[column] for row in results], expected) < 1e-5


async def sparse_of(asked: Any, _: TaskOptions) -> list[Any]:
    pooled = await asked.pooled(WORDS, task="sparse_embed")
    return [([item["index"] for item in row], [item["value"] for item in row]) for row in pooled]


async def probabilities_of(asked: Any, _: TaskOptions) -> list[Any]:
    answer = await asked.post("/classify", input=WORDS, **WHOLE)
    return [item["probs"] for item in in_order(answer["data"])]


async def rankings_of(asked: Any, task: TaskOptions) -> list[Any]:
    scores = [await asked.reranked(row["query"], row["documents"]) for row in ROWS]
    orders = [np.argsort(-each, kind="stable")[: task.top_n] for each in scores]
    return [(order, each[order]) for order, each in zip(orders, scores, strict=True)]


VALUES: dict[str, Callable[[Any, TaskOptions], Any]] = {
    "embed": lambda asked, _: asked.embeddings(WORDS, **WHOLE),
    "token-embed": lambda asked, _: asked.pooled(WORDS, task="token_embed"),
    "sparse": sparse_of,
    "classify": probabilities_of,
    "score": lambda asked, _: asked.scores(WORDS[0], WORDS),
    "rerank": rankings_of,
}
"""What the routes of a server respond for the rows."""


@pytest.fixture
def model(tmp_path: Path) -> str:
    return str(write_family(tmp_path / "bert", name="bert"))


GOOD = {"id": "good", "text": "a text"}


@pytest.fixture
def rows_with_errors(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    lines = [json.dumps(GOOD), "{not JSON", json.dumps({"id": "no text"}), json.dumps({"id": 4, "text": 5})]
    lines += [json.dumps({"id": "long", "text": "word " * 500}), json.dumps(GOOD)]
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.mark.parametrize("remote", [False, True], ids=["own engine", "server"])
async def test_vectors_with_numbers_too_large_for_float16_are_errors_of_their_rows(tmp_path, remote):
    model = write_family(tmp_path / "bert", name="bert", modules=[pooling("mean")])
    layer_norm = "encoder.layer.1.output.LayerNorm.weight"
    edit_weights(model / "model.safetensors", lambda weights: weights[layer_norm].mul_(1e6))
    task = evolve(EMBED, dtype="float16")
    rows, out = write_rows(tmp_path / "rows.jsonl"), tmp_path / "out.jsonl"
    async with serving_folder(model) as asked:
        where = {"url": str(asked.client.base_url)} if remote else {"model": str(model)}
        assert await run(rows, out, task, on_error="null", **where) == ROWS_FAILED
    assert [row["embedding"] for row in read_rows(out)] == [None] * len(ROWS)
    reasons = {row["reason"] for row in read_rows(tmp_path / "out.jsonl.errors.jsonl")}
    assert reasons == {"The vectors have numbers too large for float16."}


@pytest.mark.parametrize("remote", [False, True], ids=["own engine", "server"])
async def test_rows_that_fail_are_null_or_left_out_and_listed_with_place_id_and_reason(
    tmp_path, model, rows_with_errors, remote
):
    async with serving_folder(Path(model)) as asked:
        where = {"url": str(asked.client.base_url)} if remote else {"model": model}
        for on_error in ("null", "skip"):
            out = tmp_path / f"{on_error}.jsonl"
            status = await run(rows_with_errors, out, EMBED, truncate=False, on_error=on_error, **where)
            assert status == ROWS_FAILED
            written = read_rows(out)
            assert [row["id"] for row in written if row["embedding"]] == ["good", "good"]
            assert len(written) == (6 if on_error == "null" else 2)
            errors = read_rows(tmp_path / f"{on_error}.jsonl.errors.jsonl")
            places = [f"rows.jsonl:{line}" for line in range(2, 6)]
            assert [(row["line"], row["id"]) for row in errors] == [
                *zip(places, (1, "no text", 4, "long"), strict=True)
            ]
            assert [bool(row["reason"]) for row in errors] == [True] * 4
            assert "is not a text" in errors[2]["reason"]


async def test_rows_that_fail_fail_alone_wherever_they_are_in_a_job(tmp_path, model):
    too_long = {0, 1, ROWS_PER_JOB - 1, ROWS_PER_JOB, ROWS_PER_JOB + 100, 2 * ROWS_PER_JOB + 9}
    texts = ["word " * (500 if number in too_long else number % 9 + 1) for number in range(2 * ROWS_PER_JOB + 10)]
    path = write_rows(tmp_path / "rows.jsonl", [{"id": number, "text": text} for number, text in enumerate(texts)])
    out = tmp_path / "out.jsonl"
    assert await run(path, out, EMBED, model=model, truncate=False, on_error="null") == ROWS_FAILED
    written = read_rows(out)
    assert [row["id"] for row in written] == [*range(len(texts))]
    assert {row["id"] for row in written if row["embedding"] is None} == too_long
    errors = read_rows(tmp_path / "out.jsonl.errors.jsonl")
    assert [row["id"] for row in errors] == sorted(too_long)


async def test_shards_together_have_every_row_once(tmp_path, model):
    rows = write_rows(tmp_path / "rows.jsonl")
    seen: list[str] = []
    for shard in range(1, 4):
        out = tmp_path / f"{shard}.jsonl"
        assert await run(rows, out, EMBED, model=model, shard=f"{shard}/3", limit=len(ROWS) - 1) == 0
        seen += [row["id"] for row in read_rows(out)]
    assert sorted(seen) == sorted(row["id"] for row in ROWS[:-1])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"task": TaskOptions(task="embed", columns=("text",), dimensions=4)}, "--dimensions is 4, but was None"),
        ({"limit": 3}, "--limit is 3, but was None"),
        ({"input": b"other\n"}, "rows.jsonl has 6 bytes"),
        ({"model": "other"}, "the digest of the model's settings and weights"),
        ({"own": evolve(OWN, max_batch_tokens=128)}, "tokens in a batch is '128', but was '2048'"),
        ({"own": evolve(OWN, max_model_len=8)}, "tokens in a text is '8', but was"),
    ],
    ids=["argument", "limit", "input", "model", "budget of batches", "length of texts"],
)
async def test_a_run_of_something_else_refuses_to_go_on_and_says_what_has_changed(
    tmp_path, model, capsys, change, message
):
    rows, out = write_rows(tmp_path / "rows.jsonl"), tmp_path / "out.jsonl"
    assert await run(rows, out, EMBED, model=model) == 0
    written = out.read_bytes()
    if "input" in change:
        rows.write_bytes(change.pop("input"))
    if "model" in change:
        change["model"] = str(write_family(tmp_path / "other", name="roberta"))
    task = change.pop("task", EMBED)
    assert await run(rows, out, task, **{"model": model, **change}) == 1
    error = capsys.readouterr().err
    assert message in error
    assert "--overwrite" in error
    assert out.read_bytes() == written
    assert await run(rows, out, task, **{"model": model, "on_error": "skip", "overwrite": True, **change}) in (0, 3)


async def test_another_format_of_the_same_input_is_another_run(tmp_path, model, capsys):
    rows, out = tmp_path / "rows.csv", tmp_path / "out.jsonl"
    rows.write_text("text\na text, with a comma\n")
    assert await run(rows, out, EMBED, model=model, input_format="tsv") == 0
    assert await run(rows, out, EMBED, model=model) == 1
    assert "--input-format is 'csv', but was 'tsv'" in capsys.readouterr().err
    assert await run(rows, out, EMBED, model=model, input_format="tsv") == 0


async def test_a_run_looks_at_each_of_many_files_a_few_times(tmp_path, model, monkeypatch):
    """For their sizes, before and after the scan, behind its rows, and at the end."""
    data = tmp_path / "data"
    data.mkdir()
    for number in range(20):
        write_rows(data / f"{number}.jsonl", ROWS[:1])
    looked_at = []
    state = input_table._state
    monkeypatch.setattr(input_table, "_state", lambda file: looked_at.append(file.name) or state(file))
    assert await run(data, tmp_path / "out.jsonl", EMBED, model=model) == 0
    assert set(Counter(looked_at).values()) == {5}


async def test_rows_of_a_file_that_was_changed_since_its_scan_are_not_computed(tmp_path, model, capsys, monkeypatch):
    rows, scan = write_rows(tmp_path / "rows.jsonl"), input_table.InputTable.scan

    def changing(table, progress):
        found = scan(table, progress)
        os.utime(rows, ns=(1, 1))
        return found

    monkeypatch.setattr(input_table.InputTable, "scan", changing)
    assert await run(rows, tmp_path / "out.jsonl", EMBED, model=model, limit=2) == 1
    assert "was changed while it was read" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [("float16", (pyarrow.float16(), 16)), ("int8", (pyarrow.int8(), 16)), ("binary", (pyarrow.int8(), 2))],
)
async def test_vectors_are_of_the_type_that_is_asked_for(tmp_path, model, dtype, expected):
    rows = write_rows(tmp_path / "rows.jsonl")
    task = TaskOptions(task="embed", columns=("text",), dimensions=16, dtype=dtype)
    assert await run(rows, tmp_path / "out.parquet", task, model=model) == 0
    table = pyarrow.parquet.read_table(tmp_path / "out.parquet")
    assert table.schema.field("embedding").type == pyarrow.list_(*expected)
    assert table.num_rows == len(ROWS)


async def test_a_run_ends_with_the_first_row_that_fails_and_goes_on_with_another_on_error(
    tmp_path, model, rows_with_errors, capsys
):
    out = tmp_path / "out.jsonl"
    assert await run(rows_with_errors, out, EMBED, model=model, truncate=False) == ROWS_FAILED
    assert "rows.jsonl:2" in capsys.readouterr().err
    assert await run(rows_with_errors, out, EMBED, model=model, truncate=False, on_error="skip") == ROWS_FAILED
    assert [row["id"] for row in read_rows(out)] == ["good", "good"]
    assert await run(rows_with_errors, out, EMBED, model=model, truncate=False, on_error="null") == 1


@pytest.mark.parametrize(
    ("name", "changed", "message"),
    [
        ("out.jsonl", None, "has been deleted"),
        ("out.jsonl", "out.jsonl", "bytes were written"),
        ("out.parquet", None, "has been deleted"),
        ("out.parquet", "out.parquet/part-00001.parquet", "bytes were written"),
        ("out.parquet", "out.parquet/part-99999.parquet", "was added"),
    ],
    ids=["file deleted", "lines appended", "part deleted", "part appended to", "part added"],
)
async def test_a_complete_output_is_not_computed_again_and_one_that_was_changed_is_an_error(
    tmp_path, model, capsys, name, changed, message
):
    rows, out = write_rows(tmp_path / "rows.jsonl"), tmp_path / name
    assert await run(rows, out, EMBED, model=model, rows_per_file=3) == 0
    whole = content_of(out), out.stat()
    assert await run(rows, out, EMBED, model=model, rows_per_file=3) == 0
    assert f"{out} is complete: {len(ROWS)} rows" in capsys.readouterr().err
    assert (content_of(out), out.stat()) == whole
    if changed is None:
        (out if out.is_file() else out / "part-00001.parquet").unlink()
    else:
        with (tmp_path / changed).open("ab") as file:
            file.write(b'{"id": "of another program"}\n')
    before = content_of(out)
    assert await run(rows, out, EMBED, model=model, rows_per_file=3) == 1
    error = capsys.readouterr().err
    assert message in error
    assert "To start again, use --overwrite" in error
    assert content_of(out) == before


def content_of(out: Path) -> dict[str, bytes]:
    files = out.iterdir() if out.is_dir() else [out] if out.exists() else []
    return {file.name: file.read_bytes() for file in files}


async def test_a_model_that_cannot_be_loaded_is_said(tmp_path, model, capsys):
    own, rows = evolve(OWN, max_model_len=10**6), write_rows(tmp_path / "rows.jsonl")
    assert await run(rows, tmp_path / "out.jsonl", EMBED, model=model, own=own) == 1
    assert "1000000" in capsys.readouterr().err


@pytest.mark.slow
def test_standard_input_and_output_are_a_dash(model):
    command = [sys.executable, "-m", "trio_pool_serve", "embed", "-", "-", "--input-format", "jsonl", "--model", model]
    command += ["--backend", "torch", "--truncate"]
    lines = "".join(json.dumps(row) + "\n" for row in ROWS)
    ran = subprocess.run(command, cwd=ROOT, input=lines.encode(), check=False, capture_output=True)
    assert ran.returncode == 0, ran.stderr.decode()
    assert [json.loads(line)["id"] for line in ran.stdout.splitlines()] == [row["id"] for row in ROWS]


def test_options_that_do_not_go_together_are_one_line(tmp_path):
    command = ["-m", "trio_pool_serve", "embed", "in.jsonl", "out.jsonl", "--model", "m", "--shard", "9/3"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    ran = subprocess.run([sys.executable, *command], cwd=tmp_path, check=False, capture_output=True, env=env)
    assert ran.returncode == 2
    assert ran.stderr.decode().splitlines() == ["trio-pool-serve: --shard 9/3: shards are numbered from 1 to 3."]
