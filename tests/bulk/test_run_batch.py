"""``run-batch`` with a real model: what it does with files that it finds, with URLs, and when it goes on."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve

from tests.bulk.file_store import FileStore, served_by
from tests.lanes import sampled
from tests.models.model_families import write_family
from tests.server.server_process import ROOT
from trio_pool_serve.bulk.bulk_options import BatchModelOptions, BatchOptions
from trio_pool_serve.bulk.run_batch import run_batch
from trio_pool_serve.runs.journal import Journal
from trio_pool_serve.storage.database import open_database

OWN = BatchModelOptions(model_dtype="float32", device="cpu", backend="torch", served_model_name="m")

LINES = 600
"""More than a window has."""


@pytest.fixture
def model(tmp_path: Path) -> str:
    return str(write_family(tmp_path / "bert", name="bert"))


TOKENS = {"url": "/pooling", "more": {"task": "token_embed"}}


def write_lines(path: Path, count: int = LINES, url: str = "/v1/embeddings", more: Mapping[str, str] = {}) -> Path:
    """Write requests, of which every sixth fails."""
    lines = (
        {"custom_id": f"c{number}", "method": "POST", "url": url, "body": {"input": "a b"[:part] or 5, **more}}
        for number, part in ((number, number % 6) for number in range(1, count + 1))
    )
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    os.utime(path, (1_000_000_000, 1_000_000_000))
    return path


async def run(source: Path | str, target: Path | str, model: str, own: BatchModelOptions = OWN, **options: Any) -> int:
    batch = BatchOptions(input_file=str(source), output_file=str(target), model=model, **options)
    return await run_batch(batch, own)


def ids_in(path: Path) -> list[str]:
    return [json.loads(line)["custom_id"] for line in path.read_text().splitlines()]


@sampled(("windows", "asked"), [(0, {}), (1, {}), (2, {}), (2, TOKENS)], keep=[(1, {})])
async def test_a_run_that_has_failed_goes_on_with_the_same_bytes(tmp_path, model, monkeypatch, windows, asked):
    source = write_lines(tmp_path / "in.jsonl", **asked)
    assert await run(source, tmp_path / "whole.jsonl", model) == 3
    whole = (tmp_path / "whole.jsonl").read_bytes()
    target, commit, commits = tmp_path / "out.jsonl", Journal.commit, count()

    async def failing(journal: Any, position: Any) -> None:
        if next(commits) == windows:
            raise OSError("the machine is gone")
        await commit(journal, position)

    with monkeypatch.context() as patched:
        patched.setattr(Journal, "commit", failing)
        assert await run(source, target, model) == 1
    assert 0 < len(target.read_bytes()) <= len(whole)
    with target.open("ab") as file:
        file.write(b"half a li")
    if windows:
        os.utime(source)  # the time in the responses is that of the first run
    assert await run(source, target, model) == 3
    if windows:
        assert target.read_bytes() == whole
    assert ids_in(target) == [f"c{number}" for number in range(1, LINES + 1)]


@pytest.mark.parametrize(
    ("lines", "name", "message"),
    [(4, "m", "in.jsonl has"), (3, "n", "--served-model-name is 'n', but was 'm'")],
    ids=["input", "name"],
)
async def test_a_complete_run_says_so_and_one_of_something_else_says_what_has_changed(
    tmp_path, model, capsys, lines, name, message
):
    source, target = write_lines(tmp_path / "in.jsonl", 3), tmp_path / "out.jsonl"
    own = evolve(OWN, served_model_name=name)
    assert await run(source, target, model) == 0
    before = target.read_bytes(), target.stat()
    assert await run(source, target, model) == 0
    assert f"{target} is complete: 3 lines." in capsys.readouterr().err
    write_lines(source, lines)
    assert await run(source, target, model, own) == 1
    assert message in capsys.readouterr().err
    assert (target.read_bytes(), target.stat()) == before
    assert await run(source, target, model, own, overwrite=True) == 0
    assert len(ids_in(target)) == lines
    target.unlink()
    assert await run(source, target, model, own) == 1
    assert "has been deleted" in capsys.readouterr().err


async def test_files_that_are_not_of_a_run_are_not_touched(tmp_path, model, capsys):
    source, target = write_lines(tmp_path / "in.jsonl", 3), tmp_path / "out.jsonl"
    target.write_text("precious")
    assert await run(source, target, model) == 1
    assert "To replace it, use --overwrite" in capsys.readouterr().err
    assert target.read_text() == "precious"
    for url in ("http://", "https://[x/y"):
        assert await run(url, target, model) == 1
        assert f"'{url}'" in capsys.readouterr().err


@pytest.mark.parametrize("overwrite", [False, True])
async def test_the_output_of_another_run_is_not_touched(tmp_path, model, capsys, overwrite):
    source, target = write_lines(tmp_path / "in.jsonl", 3), tmp_path / "out.jsonl"
    assert await run(source, target, model) == 0
    before = target.read_bytes()
    async with open_database(tmp_path / "out.jsonl.journal", ""):
        assert await run(source, target, model, overwrite=overwrite) == 1
    assert "Another run is writing this output" in capsys.readouterr().err
    assert target.read_bytes() == before


async def test_an_input_that_changes_during_the_run_ends_it(tmp_path, model, capsys, monkeypatch):
    source, target = write_lines(tmp_path / "in.jsonl"), tmp_path / "out.jsonl"
    commit = Journal.commit

    async def changing(journal: Any, progress: Any) -> None:
        await commit(journal, progress)
        os.utime(source)

    with monkeypatch.context() as patched:
        patched.setattr(Journal, "commit", changing)
        assert await run(source, target, model) == 1
    assert "was changed while it was read" in capsys.readouterr().err


async def test_a_missing_input_and_an_empty_one(tmp_path, model, capsys):
    assert await run(tmp_path / "in.jsonl", tmp_path / "out.jsonl", model) == 1
    assert "No such file" in capsys.readouterr().err
    (tmp_path / "in.jsonl").write_text("\n \n")
    assert await run(tmp_path / "in.jsonl", tmp_path / "out.jsonl", model) == 0
    assert (tmp_path / "out.jsonl").read_bytes() == b""


@pytest.fixture
def store(tmp_path: Path) -> Iterator[tuple[type[FileStore], str]]:
    handler = type("Store", (FileStore,), {"folder": tmp_path / "store", "asked": []})
    handler.folder.mkdir()
    with served_by(handler) as url:
        yield handler, url


async def test_files_at_urls_are_got_and_put_once_they_are_complete(tmp_path, model, store, capsys):
    handler, base = store
    folder = handler.folder
    write_lines(folder / "in.jsonl", 3)
    work = tmp_path / "work"
    work.mkdir()
    begin = partial(run, f"{base}/in.jsonl?signature=1", f"{base}/out.jsonl?signature=2", model, output_tmp_dir=work)
    assert await begin() == 0
    assert ids_in(folder / "out.jsonl") == ["c1", "c2", "c3"]
    created = json.loads((folder / "out.jsonl").read_text().splitlines()[0])["response"]["body"]["created"]
    assert created == 1445412480  # what the store says of the input's age
    assert [line.split("?")[0] for line in handler.asked] == ["GET /in.jsonl"] * 2 + ["PUT /out.jsonl"] * 2
    (journal,) = work.iterdir()
    assert journal.name.endswith(".journal")
    assert await begin() == 0
    said = capsys.readouterr().err
    assert "/out.jsonl is complete: 3 lines." in said
    assert "signature" not in said
    assert list(work.iterdir()) == [journal]


async def test_an_output_that_the_store_refuses_is_kept_and_put_later(tmp_path, model, store, capsys):
    folder, base = store[0].folder, store[1]
    write_lines(folder / "in.jsonl", 3)
    target = f"{base}/forbidden/out.jsonl"
    assert await run(folder / "in.jsonl", target, model, output_tmp_dir=tmp_path / "store") == 1
    said = capsys.readouterr().err
    assert "status 403" in said
    (kept,) = folder.glob("run-batch-*.jsonl")
    assert str(kept) in said
    assert ids_in(kept) == ["c1", "c2", "c3"]
    assert await run(folder / "in.jsonl", target, model, output_tmp_dir=tmp_path / "store") == 1
    assert kept.exists()


@pytest.mark.slow
def test_flags_that_are_vllm_s_are_accepted_and_missing_ones_named(tmp_path: Path):
    ignored = [
        *("--max-log-len", "5", "--response-role", "assistant", "--url", "0.0.0.0", "--port", "0"),
        *("--enable-prompt-tokens-details", "--enable-force-include-usage", "--enable-metrics"),
    ]
    needed = ["-o", "out.jsonl", "--model", "m", "--dtype", "float32", "--device", "cpu"]
    both = [*needed, "--output-tmp-dir", str(tmp_path), "--served-model-name", "m", *ignored]
    for options, status, message in (([], 2, "--output-file"), (both, 1, "in.jsonl: No such file")):
        command = [sys.executable, "-m", "trio_pool_serve", "run-batch", "-i", str(tmp_path / "in.jsonl"), *options]
        ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert ended.returncode == status
        assert message in ended.stdout + ended.stderr
