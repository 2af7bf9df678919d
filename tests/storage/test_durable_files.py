"""Files whose bytes are on the disk."""

import os
from pathlib import Path

import pytest

from tests.scarcity import no_more_files
from trio_pool_serve.errors import StorageBusyError, StorageError, StorageFullError
from trio_pool_serve.storage.durable_files import open_appended, publish


def test_bytes_after_the_committed_length_are_cut_off(tmp_path):
    path = tmp_path / "file"
    file = open_appended(path, 0)
    file.append(b"committed")
    length = file.sync()
    file.append(b", and not")
    file.close()
    file = open_appended(path, length)
    file.append(b" again")
    assert file.sync() == 15
    file.close()
    assert path.read_bytes() == b"committed again"


def test_a_file_that_has_been_cut_or_deleted_is_an_error(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"four")
    with pytest.raises(StorageError, match="has 4 bytes, where 9 had been written"):
        open_appended(path, 9)
    path.unlink()
    with pytest.raises(StorageError, match="has been deleted"):
        open_appended(path, 9)


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


def test_a_full_disk_is_an_error_with_the_path(small_disk):
    file = open_appended(small_disk / "file", 0)
    with pytest.raises(StorageFullError, match=f"{small_disk}/file: No space left on device"):
        file.append(os.urandom(4 * 2**20))
    file.close()
