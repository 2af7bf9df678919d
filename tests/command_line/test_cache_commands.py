"""``trio-pool-serve cache``: what is kept, and its removal."""

import os
import pty
import subprocess
import sys
import time
from pathlib import Path

import pytest

from trio_pool_serve.cli import make_app
from trio_pool_serve.storage.model_cache import ModelCache, RecordBase

RECORD = RecordBase(what="backbone in int8", versions={"openvino": "2026.4.1", "torch": "2.9"})
LIST = [sys.executable, "-m", "trio_pool_serve", "cache", "list", "--cache-dir"]


def write(folder: Path) -> RecordBase:
    (folder / "model.bin").write_bytes(bytes(1_500_000))
    return RECORD


@pytest.fixture
def names(tmp_path: Path) -> list[str]:
    """Names of two entries, the first used last."""
    cache, paths = ModelCache(tmp_path), []
    for number, name in enumerate(("minilm", "bge-m3")):
        entry = cache.entry(name, "key", name)
        entry.put(write)
        paths.append(entry.path)
        os.utime(entry.path, (time.mktime((2026, 1, 5 - number, 12, 34, 0, 0, 0, -1)),) * 2)
    return [path.name for path in paths]


def run(*arguments: str, cache: Path) -> int:
    return make_app()(["cache", *arguments, "--cache-dir", str(cache)], result_action="return_value")


def test_the_list_has_lines_with_tabs_and_a_total_beside(names, tmp_path, capsys):
    made_with = "openvino 2026.4.1, torch 2.9"
    assert run("list", cache=tmp_path) == 0
    shown = capsys.readouterr()
    assert [line.split("\t") for line in shown.out.splitlines()] == [
        [name, "backbone in int8", "1.5 MB", f"2026-01-0{5 - n} 12:34", made_with] for n, name in enumerate(names)
    ]
    assert shown.err == f"2 entries in {tmp_path}, 3.0 MB in total\n"
    (tmp_path / names[1] / "record.json").write_text("{}")  # which no start would read
    run("list", cache=tmp_path)
    assert f"{names[1]}\tfrom another version, not used\t1.5 MB\t" in capsys.readouterr().out


def test_the_directory_is_found_as_by_serve(names, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    make_app()(["cache", "list"], result_action="return_value")
    assert capsys.readouterr().err == f"0 entries in {tmp_path}/xdg/trio_pool_serve, 0.0 MB in total\n"
    monkeypatch.setenv("TRIO_POOL_SERVE_CACHE_DIR", str(tmp_path))
    make_app()(["cache", "list"], result_action="return_value")
    assert capsys.readouterr().err.startswith(f"2 entries in {tmp_path}, ")
    for command in (["list"], ["remove", "--all"]):
        with pytest.raises(ValueError, match=r"--cache-dir is empty: name the directory of the cache\."):
            make_app()(["cache", *command, "--cache-dir", ""], result_action="return_value")


def test_a_directory_that_cannot_be_read_is_named(tmp_path):
    (tmp_path / "file").touch()
    done = subprocess.run([*LIST, str(tmp_path / "file")], check=False, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (2, f"trio-pool-serve: {tmp_path}/file: Not a directory.\n")


@pytest.mark.parametrize("everything", [False, True])
def test_named_entries_or_all_are_removed_and_nothing_else(names, tmp_path, capsys, everything):
    (tmp_path / "notes").mkdir()
    removed = names if everything else names[1:]
    assert run("remove", *(["--all"] if everything else removed * 2), cache=tmp_path) == 0
    assert capsys.readouterr().out == "".join(f"removed {name}, 1.5 MB\n" for name in removed)
    assert {path.name for path in tmp_path.iterdir()} == {"notes", "digests.json", *names} - set(removed)


@pytest.mark.parametrize("wrong", [["minilm"], ["../notes"], [], ["--all"]])
def test_what_is_not_named_right_removes_nothing(wrong, names, tmp_path):
    (tmp_path / "notes").mkdir()
    given = [*wrong, names[0]] if wrong else []
    message = (
        f"does not contain {wrong[0]}" if wrong and wrong != ["--all"] else "Name the models to remove .* or use --all"
    )
    with pytest.raises(ValueError, match=rf"{message}\. It contains: {names[0]}, {names[1]}\."):
        run("remove", *given, cache=tmp_path)
    assert len(ModelCache(tmp_path).entries()) == 2


def test_an_entry_that_is_locked_stays_which_is_said(names, tmp_path, capsys):
    with ModelCache(tmp_path).entry("minilm", "key", "minilm").locked():
        assert run("remove", "--all", cache=tmp_path) == 1
    shown = capsys.readouterr()
    assert shown.err == f"{names[0]} was not removed: a process is converting or reading it\n"
    assert shown.out == f"removed {names[1]}, 1.5 MB\n"
    assert [entry.name for entry in ModelCache(tmp_path).entries()] == names[:1]


def test_a_terminal_shows_columns_whose_names_can_be_copied(names, tmp_path):
    ours, terminal = pty.openpty()
    environment = os.environ | {"NO_COLOR": "1", "TERM": "dumb"}
    command = [*LIST, str(tmp_path)]
    done = subprocess.run(command, check=True, stdout=terminal, stderr=subprocess.PIPE, env=environment)
    os.close(terminal)
    heading, *rows = [line.split() for line in os.read(ours, 2**16).decode().splitlines()]
    os.close(ours)
    assert heading == ["name", "what", "size", "last", "used", "made", "with"]
    assert [row[0] for row in rows if row[0] in names] == names  # in 80 columns, where other cells are folded
    assert b"2 entries in " in done.stderr
