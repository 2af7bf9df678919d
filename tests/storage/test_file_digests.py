"""Digests of files that are remembered between processes."""

import hashlib
import multiprocessing
import os
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from trio_pool_serve.storage import file_digests as module
from trio_pool_serve.storage.file_digests import SMALL_FILE, file_digests


def write(path: Path, content: bytes = b"", *, age_s: float = 10.0) -> Path:
    path.write_bytes(content.ljust(SMALL_FILE + 1))
    os.utime(path, (time.time() - age_s,) * 2)
    return path


def digest(path: Path, memory: Path | None) -> str:
    found = file_digests([path], memory)[path]
    assert found == hashlib.sha256(path.read_bytes()).hexdigest()
    return found


def test_a_file_is_read_once_while_it_stays_the_same(tmp_path: Path, read_files: list[str]):
    path, memory = write(tmp_path / "file"), tmp_path / "new" / "memory.json"
    (tmp_path / "link").symlink_to(path)
    first = digest(path, memory)
    assert digest(path, memory) == digest(tmp_path / "link", memory) == first
    assert read_files == ["file"]
    digest(path, None)
    assert len(read_files) == 2


def test_any_change_is_noticed(tmp_path: Path, read_files: list[str]):
    path, memory = write(tmp_path / "file", b"old"), tmp_path / "memory.json"
    seen = {digest(path, memory)}
    status = path.stat()
    with path.open("r+b") as file:
        file.write(b"new")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))  # only the time of change tells
    seen.add(digest(path, memory))
    with path.open("r+b") as file:
        file.write(b"two")
    seen.add(digest(path, memory))
    write(tmp_path / "other", b"other", age_s=20).replace(path)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    seen.add(digest(path, memory))
    assert len(seen) == len(read_files) == 4


def test_a_file_that_has_just_been_changed_is_read_again(tmp_path: Path, read_files: list[str]):
    """It may be changed once more without another time."""
    path, memory = write(tmp_path / "file", age_s=1), tmp_path / "memory.json"
    assert digest(path, memory) == digest(path, memory)
    assert len(read_files) == 2
    assert not memory.exists()


@pytest.mark.parametrize("content", [b"", b"\xff", b"[]", b'{"a": 1}', b"[" * 10**5, b'{"a": [1, 2, 3, 4]}'])
def test_a_memory_that_is_damaged_is_made_anew(content: bytes, tmp_path: Path, read_files: list[str]):
    path, memory = write(tmp_path / "file"), tmp_path / "memory.json"
    memory.write_bytes(content)
    assert digest(path, memory) == digest(path, memory)
    assert len(read_files) == 1


def test_the_latest_files_are_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read_files: list[str]):
    monkeypatch.setattr(module, "MOST_FILES", 2)
    memory = tmp_path / "memory.json"
    paths = [write(tmp_path / name) for name in "abc"]
    for path in paths:
        digest(path, memory)
    file_digests(paths, memory)
    assert read_files == ["a", "b", "c", "a"]
    file_digests(paths[1:], memory)
    assert read_files == ["a", "b", "c", "a", "b"]


def test_a_memory_that_cannot_be_written_does_not_matter(tmp_path: Path):
    path = write(tmp_path / "file")
    digest(path, path / "memory.json")


def read_many(folder: Path, number: int) -> None:
    for name in range(20):
        digest(write(folder / f"{number}-{name}", str((number, name)).encode()), folder / "memory.json")


@pytest.mark.slow
def test_processes_remember_each_other_s_digests(tmp_path: Path, read_files: list[str]):
    with ProcessPoolExecutor(3, multiprocessing.get_context("spawn")) as processes:
        [*processes.map(read_many, [tmp_path] * 3, range(3))]
    paths = sorted(tmp_path.glob("*-*"))
    found = file_digests(paths, tmp_path / "memory.json")
    assert read_files == []
    assert found == {path: hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}
    assert len(found) == 60
