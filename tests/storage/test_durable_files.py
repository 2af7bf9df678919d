"""Files whose bytes are on the disk."""

import os
from pathlib import Path

import pytest

from tests.scarcity import no_more_files
from trio_pool_serve.errors import StorageBusyError
from trio_pool_serve.storage.durable_files import open_appended, publish


def test_a_published_file_replaces_the_one_before(tmp_path):
    (tmp_path / "new").write_bytes(b"new")
    (tmp_path / "file").write_bytes(b"old")
    publish(tmp_path / "new", tmp_path / "file")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_bytes() == b"new"


def test_a_published_folder_and_all_in_it_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    new, path = tmp_path / "new", tmp_path / "folder"
    new.mkdir()
    for name in ("a", "b"):
        (new / name).write_text(name)
    synced = []
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(str(Path(f"/proc/self/fd/{fd}").readlink())))
    publish(new, path)
    assert sorted(synced[:2]) == [str(new / "a"), str(new / "b")]
    assert synced[2:] == [str(new), str(tmp_path)]
    assert sorted(each.name for each in path.iterdir()) == ["a", "b"]


def test_a_file_that_cannot_be_opened_now_is_not_a_full_disk(tmp_path):
    with no_more_files(), pytest.raises(StorageBusyError, match="Too many open files"):
        open_appended(tmp_path / "file", 0)
    open_appended(tmp_path / "file", 0).close()
