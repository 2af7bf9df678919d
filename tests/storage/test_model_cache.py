"""Converted models on disk: found by content, complete or missing, and bounded."""

import errno
import multiprocessing
import os
import random
import stat
import subprocess
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from attrs import frozen

from trio_pool_serve.errors import StorageError
from trio_pool_serve.storage import file_digests, model_cache
from trio_pool_serve.storage.model_cache import CacheEntry, ModelCache, RecordBase, written


@frozen
class Record(RecordBase):
    cosine: float = 1.0


@pytest.fixture
def cache(tmp_path: Path) -> ModelCache:
    return ModelCache(tmp_path / "cache")


LARGE = file_digests.SMALL_FILE + 1


def put(entry: CacheEntry, size: int = LARGE, record: Record = Record(0.5)) -> Path:
    def write(folder: Path) -> Record:
        (folder / "model.xml").write_text("<net/>")
        (folder / "model.bin").write_bytes(bytes(size))
        return record

    with written(write, entry) as (path, found):
        assert found is record
        return path


def use_earlier(path: Path, seconds: float) -> None:
    os.utime(path, (time.time() - seconds,) * 2)


# -- reading --------------------------------------------------------------------------------------------


def test_an_entry_is_found_by_its_key_under_any_name(cache: ModelCache):
    path = put(cache.entry("a model/of mine", "content", "int8"))
    assert path == cache.folder / f"a_model_of_mine-{path.name[-16:]}"
    for name in ("a model/of mine", "a copy", ""):
        found = cache.entry(name, "content", "int8")
        assert (found.path, found.read(Record)) == (path, Record(0.5))
    for key in (("content", "bfloat16"), ("content", "int", "8"), ("content",), ("other", "int8")):
        assert cache.entry("a model/of mine", *key).read(Record) is None
    assert put(cache.entry("a copy", "content", "int8"), record=Record(0.75)) == path
    assert cache.entry("a model", "content", "int8").read(Record) == Record(0.75)
    assert [entry.name for entry in cache.entries()] == [path.name]


def test_an_entry_belongs_to_its_user_and_nothing_else_is_left(cache: ModelCache):
    path = put(cache.entry("m", "key"))
    assert stat.S_IMODE(cache.folder.stat().st_mode) == stat.S_IMODE(path.stat().st_mode) == 0o700
    assert {file.name: stat.S_IMODE(file.stat().st_mode) for file in path.iterdir()} == dict.fromkeys(
        ("model.xml", "model.bin", "record.json"), 0o600
    )
    assert {path.name for path in cache.folder.iterdir()} == {path.name, "digests.json"}


def test_an_entry_that_was_published_is_read_without_reading_its_files(cache: ModelCache, read_files: list[str]):
    entry = cache.entry("m", "key")
    put(entry)
    assert entry.read(Record) == Record(0.5)
    assert read_files == []
    cache.memory.unlink()
    assert [entry.read(Record) for _ in range(2)] == [Record(0.5)] * 2
    assert sorted(read_files) == ["model.bin", "model.xml", "model.xml"]  # the small one again


def change_a_byte(path: Path) -> None:
    with path.open("r+b") as file:
        file.write(b"\xff")


DAMAGES = {
    "changed": change_a_byte,
    "cut": lambda path: os.truncate(path, path.stat().st_size // 2),
    "unreadable": lambda path: (path.unlink(), path.mkdir()),
    "gone": Path.unlink,
}


@pytest.mark.parametrize("name", ["model.xml", "model.bin"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_entry_is_missing_which_is_logged(
    name: str, damage: str, cache: ModelCache, caplog: pytest.LogCaptureFixture
):
    entry = cache.entry("m", "key")
    path = put(entry)
    assert entry.read(Record) is not None
    DAMAGES[damage](path / name)
    assert entry.read(Record) is None
    assert f"{path} is damaged, and not used: " in caplog.text
    put(entry)
    assert entry.read(Record) == Record(0.5)


def test_a_file_that_is_changed_right_after_it_was_published_is_noticed(cache: ModelCache):
    for number in range(50):
        entry = cache.entry("m", str(number))
        change_a_byte(put(entry) / "model.bin")
        assert entry.read(Record) is None


@pytest.mark.parametrize(
    "content",
    [
        b"", b"[]", b"\xff", b"null", b"[" * 10**5, b'{"format": 3}',
        b'{"format": 3, "files": {}, "record": {"cosine": "1"}}',
        b'{"format": 3, "files": {"gone": "0"}, "record": {"cosine": 1}}',
        b'{"format": 3, "files": {"record.json": "0"}, "record": {"cosine": 1}}',
        b'{"format": 2, "files": {}, "record": {"cosine": 1}}',
        b'{"digest": "0", "record": {"cosine": 1}}',
    ],
)  # fmt: skip
def test_a_record_that_is_none_counts_as_missing(content: bytes, cache: ModelCache):
    entry = cache.entry("m", "key")
    (put(entry) / "record.json").write_bytes(content)
    assert entry.read(Record) is None
    put(entry)
    assert entry.read(Record) == Record(0.5)


def test_the_cache_is_in_the_user_s_cache_folder_or_at_cache_dir(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/user")
    for variable, folder in {"": "/home/user/.cache", "relative": "/home/user/.cache", "/xdg": "/xdg"}.items():
        monkeypatch.setenv("XDG_CACHE_HOME", variable)
        assert ModelCache.of(None) == ModelCache(Path(folder) / "trio_pool_serve")
    assert ModelCache.of("") is None
    assert ModelCache.of("some/where") == ModelCache(tmp_path / "some" / "where")
    assert ModelCache.of("~/there") == ModelCache(Path("/home/user/there"))


# -- folders that cannot be written, and full disks -------------------------------------------------------


def test_a_cache_that_cannot_be_made_is_done_without(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    (tmp_path / "file").touch()
    entry = ModelCache(tmp_path / "file" / "cache").entry("m", "key")
    with entry.locked():
        assert entry.put(lambda _: Record()) is None
    assert caplog.messages == [f"m is not cached: {tmp_path}/file/cache: Not a directory."]
    assert (entry.read(Record), entry.cache.entries()) == (None, [])


def test_a_cache_on_a_read_only_disk_is_read(small_disk: Path, caplog: pytest.LogCaptureFixture):
    cache = ModelCache(small_disk)
    entry = cache.entry("m", "key")
    put(entry)
    cache.memory.unlink()
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with entry.locked():
        assert [entry.read(Record) for _ in range(2)] == [Record(0.5)] * 2
    other = cache.entry("other", "key 2")
    assert put(other).parent == Path(tempfile.gettempdir())
    assert caplog.messages == [f"other is not cached: {small_disk}: Read-only file system."]
    (summary,) = cache.entries()
    with pytest.raises(StorageError, match="Read-only file system"):
        cache.remove(summary)


def test_on_a_full_disk_the_model_is_saved_elsewhere(
    small_disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    cache = ModelCache(small_disk)
    kept = put(cache.entry("used", "a"), 2**20)
    assert put(cache.entry("m", "b"), 2**20).parent == tmp_path
    assert "m is not cached: " in caplog.text
    assert "No space left on device" in caplog.text
    assert {path.name for path in small_disk.iterdir()} == {kept.name, "digests.json"}
    assert {path.name for path in tmp_path.iterdir()} == {"disk"}


def test_on_a_full_disk_entries_make_room_that_were_not_used_within_the_last_hour(small_disk: Path):
    cache = ModelCache(small_disk)
    for key in "ab":
        use_earlier(put(cache.entry(key, key), 2**18), 3601 if key == "a" else 3500)

    def write_and_fill_the_disk(folder: Path) -> Record:
        (folder / "model.bin").write_bytes(bytes(2**18))
        if not (small_disk / "data").exists():
            with pytest.raises(OSError, match="No space"):
                (small_disk / "data").write_bytes(bytes(2**21))
        return Record(0.5)

    assert cache.entry("c", "c").put(write_and_fill_the_disk) is not None
    assert cache.entry("c", "c").read(Record) == Record(0.5)
    assert [entry.name[0] for entry in cache.entries()] == ["c", "b"]


def test_a_part_of_a_model_makes_room_before_the_model_is_saved_elsewhere(cache: ModelCache):
    seen: list[int] = []

    def write(folder: Path) -> Record:
        (folder / "model.xml").touch()
        seen.append(len([path for path in cache.folder.iterdir() if path.is_dir()]))
        if len(seen) == 1:
            raise OSError(errno.ENOSPC, "the disk is full")
        return Record()

    with written(write, cache.entry("m", "key")) as (path, _):
        assert (path / "model.xml").exists()
        assert (seen, [*cache.folder.iterdir()]) == ([1, 0], [])
    assert not path.exists()


def test_unfinished_entries_are_removed_after_a_day(cache: ModelCache):
    key = "0123456789abcdef"
    names = {f".{key}.abc": False, f".model-{key}.abc": False, f".{key}.abd": True, ".ssh": True, f"model-{key}": True}
    for name in names:
        (cache.folder / name).mkdir(parents=True)
        use_earlier(cache.folder / name, 80_000 if name.endswith("abd") else 90_000)
    cache.entry("m", "key").put(lambda _: Record())
    assert {name: (cache.folder / name).exists() for name in names} == names


# -- the bound -------------------------------------------------------------------------------------------


def test_entries_that_were_not_used_for_longest_are_removed_for_a_new_one(
    cache: ModelCache, monkeypatch: pytest.MonkeyPatch
):
    for hours, key in enumerate("abcdef"):
        use_earlier(put(cache.entry(key, key)), hours * 7200)
    cache.entry("f", "f").read(Record)  # which is a use
    monkeypatch.setattr(model_cache, "LIMIT_BYTES", 4 * (LARGE + 1000))
    put(cache.entry("g", "g"))
    assert [entry.name[0] for entry in cache.entries()] == ["g", "f", "a", "b"]


def test_entries_of_the_last_hour_and_locked_ones_are_not_removed(cache: ModelCache, monkeypatch: pytest.MonkeyPatch):
    for key, seconds in {"a": 3590, "b": 3610, "c": 3620}.items():
        use_earlier(put(cache.entry(key, key)), seconds)
    monkeypatch.setattr(model_cache, "LIMIT_BYTES", 0)
    with cache.entry("b", "b").locked():
        put(cache.entry("d", "d"))
        (listed,) = [entry for entry in cache.entries() if entry.name[0] == "b"]
        assert not cache.remove(listed)
    assert [entry.name[0] for entry in cache.entries()] == ["d", "a", "b"]


def test_no_more_is_removed_than_must_be_if_several_make_room_at_once(cache: ModelCache):
    for number in range(40):
        use_earlier(put(cache.entry("m", str(number)), 1000), 7200 + number)
    size = sum(entry.size_bytes for entry in cache.entries())
    with ThreadPoolExecutor(4) as threads:
        [*threads.map(lambda _: cache.make_room(size // 2), range(4))]
    assert len(cache.entries()) == 20


def test_other_files_are_neither_listed_nor_removed(cache: ModelCache):
    cache.folder.mkdir()
    key = "0123456789abcdef"
    (cache.folder / f"photos-{key}").mkdir()
    (cache.folder / f"photos-{key}" / "photo").touch()
    (cache.folder / "record.json").touch()
    path = put(ModelCache(cache.folder / "elsewhere").entry("m", "key"))
    (cache.folder / f"link-{key}").symlink_to(path)
    cache.make_room()
    assert cache.entries() == []
    assert (cache.folder / f"photos-{key}" / "photo").exists()
    assert path.exists()


def test_an_entry_of_an_older_version_is_listed_and_makes_room(cache: ModelCache):
    path = put(cache.entry("bert", "key"))
    (path / "record.json").write_text('{"digest": "", "record": {}}')
    use_earlier(path, 3601)
    assert [(entry.name, entry.about) for entry in cache.entries()] == [(path.name, None)]
    cache.make_room()
    assert cache.entries() == []


def test_an_entry_that_was_used_since_it_was_listed_is_not_removed(cache: ModelCache):
    entry = cache.entry("m", "key")
    use_earlier(put(entry), 3601)
    (listed,) = cache.entries()
    entry.read(Record)
    assert not cache.remove(listed, even_if_used=False)
    assert cache.remove(listed)
    assert entry.read(Record) is None


ENTRIES = 6

SPAWN = multiprocessing.get_context("spawn")


def use_entries(folder: Path, seed: int) -> tuple[int, list[int]]:
    """Read entries chosen at random, or convert them; return how many were converted, and which were wrong."""
    model_cache.LIMIT_BYTES = 3 * 110_000
    model_cache.IN_USE_S = 0
    chosen = random.Random(seed)
    cache, converted, problems = ModelCache(folder), 0, []
    for _ in range(60):
        number = chosen.randrange(ENTRIES)
        entry = cache.entry(f"name-{seed}", str(number))
        with entry.locked():
            record = entry.read(Record)
            if record is None:
                converted += 1
                put(entry, 100_000 + number, Record(number))
            elif record != Record(number) or (entry.path / "model.bin").stat().st_size != 100_000 + number:
                problems.append(number)
    return converted, problems


def use_entries_until_killed(folder: Path, seed: int, started: Any) -> None:
    started.set()
    while True:
        use_entries(folder, seed)


def test_processes_that_convert_read_and_remove_at_once_see_complete_entries(cache: ModelCache):
    with ProcessPoolExecutor(3, SPAWN) as processes:
        answers = [*processes.map(use_entries, [cache.folder] * 3, range(3), timeout=60)]
    assert all(problems == [] for _, problems in answers), answers
    assert ENTRIES < sum(converted for converted, _ in answers) < 3 * 60
    left = {path.name for path in cache.folder.iterdir()}
    assert left == {entry.name for entry in cache.entries()} | {"digests.json"}
    assert sum(entry.size_bytes for entry in cache.entries()) <= 4 * 110_000


@pytest.mark.slow
def test_processes_that_are_killed_leave_complete_entries_or_none(cache: ModelCache, caplog: pytest.LogCaptureFixture):
    chosen, seen = random.Random(0), 0
    for seed in range(12):
        started = SPAWN.Event()
        process = SPAWN.Process(target=use_entries_until_killed, args=(cache.folder, seed, started))
        process.start()
        assert started.wait(60)
        process.join(chosen.uniform(0.01, 0.1))
        process.kill()
        process.join()
        for number in range(ENTRIES):
            entry = cache.entry("m", str(number))
            with entry.locked():
                record = entry.read(Record)
            assert record in (None, Record(number))
            seen += record is not None
    assert seen
    assert "damaged" not in caplog.text
    for path in cache.folder.glob(".*"):
        use_earlier(path, 90_000)
    put(cache.entry("m", "key"))
    assert [*cache.folder.glob(".*")] == []
