"""How commands treat files that they find at their output."""

import shutil
import sqlite3
import sys
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest

from tests.bulk.test_commands import EMBED, ROWS, run, write_rows
from tests.bulk.test_run_batch import run as run_requests
from tests.models.model_families import write_family
from trio_pool_serve.bulk.earlier_output import check_output
from trio_pool_serve.errors import BulkInputError
from trio_pool_serve.runs.journal import SCHEMA, Journal
from trio_pool_serve.runs.run import Position
from trio_pool_serve.storage.database import SETTINGS

NO_MODEL = "no model"
"""None is loaded before the files are checked."""


def files_in(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize(
    ("source", "target", "output_format"),
    [
        ("data/texts.jsonl", "data/texts.jsonl", None),
        ("data/*.jsonl", "data/texts.jsonl", None),
        ("data/*.jsonl", "data", "parquet"),
        ("data", "data", "parquet"),
        ("data/deep/**/*.jsonl", "data", "parquet"),
        ("data/link.jsonl", "data/texts.jsonl", None),
        ("data/out.jsonl.errors.jsonl", "data/out.jsonl", None),
    ],
    ids=["file", "glob", "folder of a glob", "folder", "folder above", "link", "errors file"],
)
async def test_an_output_that_is_the_input_or_has_it_inside_is_refused(
    tmp_path, capsys, source, target, output_format, overwrite
):
    data = tmp_path / "data"
    (data / "deep").mkdir(parents=True)
    for name in ("texts.jsonl", "deep/more.jsonl", "out.jsonl.errors.jsonl"):
        write_rows(data / name)
    (data / "link.jsonl").symlink_to("texts.jsonl")
    before = files_in(tmp_path)
    options = {"model": NO_MODEL, "overwrite": overwrite, "output_format": output_format}
    assert await run(tmp_path / source, tmp_path / target, EMBED, **options) == 1
    assert "Name another output" in capsys.readouterr().err
    assert files_in(tmp_path) == before


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("target", ["", "empty", "in.jsonl"], ids=["folder of the input", "empty folder", "input"])
async def test_a_folder_or_the_input_is_not_the_output_of_run_batch(tmp_path, capsys, target, overwrite):
    (tmp_path / "empty").mkdir()
    write_rows(tmp_path / "in.jsonl")
    before = files_in(tmp_path)
    assert await run_requests(tmp_path / "in.jsonl", tmp_path / target, NO_MODEL, overwrite=overwrite) == 1
    said = capsys.readouterr().err
    assert ("is a folder" if target == "empty" else "Name another output") in said
    assert (tmp_path / "empty").is_dir()
    assert files_in(tmp_path) == before


def empty(journal: Path) -> None:
    journal.touch()


def copied_without_its_log(journal: Path) -> None:
    """Write the file of a database whose write-ahead log holds all of a run, and was not copied."""
    original = journal.with_name("original")
    with closing(sqlite3.connect(original, isolation_level=None)) as connection:
        connection.executescript(SETTINGS + SCHEMA)
        connection.execute("INSERT INTO run VALUES ('identity', '{}')")
        shutil.copy(original, journal)
    original.unlink()


@pytest.mark.parametrize("write_journal", [empty, copied_without_its_log])
@pytest.mark.parametrize(
    "command",
    [partial(run, task=EMBED, model=NO_MODEL), partial(run_requests, model=NO_MODEL)],
    ids=["embed", "run-batch"],
)
async def test_an_output_beside_a_journal_of_no_run_is_not_changed(tmp_path, capsys, command, write_journal):
    """Such a journal says nothing about the output, so a run would begin with removing it."""
    source, target = write_rows(tmp_path / "in.jsonl"), tmp_path / "out.jsonl"
    target.write_text("precious")
    write_journal(tmp_path / "out.jsonl.journal")
    before = files_in(tmp_path)
    assert await command(source, target) == 1
    assert "without the journal of a run to resume" in capsys.readouterr().err
    assert files_in(tmp_path) == before


@pytest.mark.parametrize(
    ("source", "target", "package"),
    [
        ("in.jsonl", "out.parquet", "pyarrow"),
        ("in.jsonl", "out.arrow", "pyarrow"),
        ("in.jsonl", "out.jsonl.zst", "zstandard"),
        ("in.jsonl.zst", "out.jsonl", "pyarrow"),
    ],
)
async def test_a_missing_package_is_said_before_anything_is_loaded_or_removed(
    tmp_path, capsys, monkeypatch, source, target, package
):
    write_rows(tmp_path / source)
    (tmp_path / target).write_text("an earlier output")
    before = files_in(tmp_path)
    monkeypatch.setitem(sys.modules, package, None)
    assert await run(tmp_path / source, tmp_path / target, EMBED, model=NO_MODEL, overwrite=True) == 1
    assert "Install the extra `bulk`" in capsys.readouterr().err
    assert files_in(tmp_path) == before


def test_of_a_folder_only_the_parts_are_removed(tmp_path):
    out, errors = tmp_path / "out[1].parquet", tmp_path / "out[1].parquet.errors.jsonl"
    out.mkdir()
    for name in ("part-00000.parquet", "part-00001.parquet.tmp", "part-00000.arrow", "_SUCCESS", ".hidden"):
        (out / name).write_text(name)
    for name in ("errors.jsonl", "journal", "journal-wal", "other"):
        (tmp_path / f"{out.name}.{name}").write_text("")
    check_output(out, inputs=(), overwrite=True, in_parts=True, beside=(errors,))
    assert sorted(files_in(tmp_path)) == ["out[1].parquet.other", "out[1].parquet/.hidden", "out[1].parquet/_SUCCESS"]


@pytest.mark.parametrize("name", ["precious", "part-1.parquet", "part-00000.parquet/a"])
def test_a_folder_with_other_files_is_not_overwritten(tmp_path, name):
    out = tmp_path / "out.parquet"
    (out / name).parent.mkdir(parents=True)
    (out / name).write_text("precious")
    (out / "part-00001.parquet").write_text("")
    before = files_in(tmp_path)
    with pytest.raises(BulkInputError, match="contains other files"):
        check_output(out, inputs=(), overwrite=True, in_parts=True)
    assert files_in(tmp_path) == before


@pytest.mark.parametrize(
    ("source", "target"),
    [("*.jsonl", "out.jsonl"), ("", "out.jsonl"), ("*", "out.jsonl"), ("**/*", "out.arrow")],
    ids=["glob", "folder", "glob with the journal", "glob with the parts"],
)
async def test_what_a_run_has_written_is_not_among_its_inputs_when_it_goes_on(
    tmp_path, monkeypatch, capsys, source, target
):
    model = str(write_family(tmp_path / "model" / "bert", name="bert"))
    data = tmp_path / "data"
    data.mkdir()
    write_rows(data / "rows.jsonl", [*ROWS, {"id": "wrong"}])
    options = {"model": model, "on_error": "skip", "input_format": "jsonl"}
    commit = Journal.commit

    async def failing(journal: Journal, position: Position) -> None:
        await commit(journal, position)
        raise OSError("the machine is gone")

    with monkeypatch.context() as patched:
        patched.setattr(Journal, "commit", failing)
        assert await run(data / source, data / target, EMBED, **options) == 1
    assert (data / f"{target}.errors.jsonl").stat().st_size
    for overwrite in (False, False, True):
        assert await run(data / source, data / target, EMBED, overwrite=overwrite, **options) == 3
    assert f"embed: {len(ROWS) + 1} of {len(ROWS) + 1} rows" in capsys.readouterr().err


async def test_an_input_of_nothing_but_the_output_is_refused(tmp_path, capsys):
    """Of a glob the output is left out, so there is no file."""
    for name in ("out.jsonl", "out.jsonl.journal"):
        write_rows(tmp_path / name)
    assert await run(tmp_path / "*.jsonl", tmp_path / "out.jsonl", EMBED, model=NO_MODEL, overwrite=True) == 1
    assert "no such file" in capsys.readouterr().err
    assert (tmp_path / "out.jsonl").exists()
