"""A database on a thread of its own."""

import shutil
import signal
import sqlite3
import subprocess
import sys

import pytest
import trio

from trio_pool_serve.errors import StorageError, StorageFullError, StorageInUseError, StorageLostError
from trio_pool_serve.storage.database import open_database

SCHEMA = "CREATE TABLE IF NOT EXISTS numbers (number INTEGER PRIMARY KEY)"

HOLDER = """
import sys, trio
from pathlib import Path
from trio_pool_serve.storage.database import open_database

async def main():
    async with open_database(Path(sys.argv[1]), "CREATE TABLE IF NOT EXISTS numbers (number INTEGER)") as database:
        await database.run(lambda connection: connection.execute("INSERT INTO numbers VALUES (7)"))
        print("open", flush=True)
        await trio.sleep_forever()

trio.run(main)
"""


def numbers(connection: sqlite3.Connection) -> list[int]:
    return [row[0] for row in connection.execute("SELECT number FROM numbers ORDER BY number")]


def insert_one(connection: sqlite3.Connection) -> None:
    connection.execute("INSERT INTO numbers VALUES (1)")


async def test_a_transaction_that_raises_leaves_nothing_and_a_closed_database_says_so(tmp_path):
    def insert_and_raise(connection: sqlite3.Connection) -> None:
        insert_one(connection)
        raise LookupError

    async with open_database(tmp_path / "database", SCHEMA) as database:
        with pytest.raises(LookupError):
            await database.run(insert_and_raise)
        assert await database.run(numbers) == []
    with pytest.raises(StorageError, match="has been closed"):
        await database.run(numbers)


async def test_a_cancelled_transaction_is_committed_before_the_next(tmp_path):
    """A caller that is cancelled leaves at once; the transaction that it has begun is neither lost nor cut in two."""
    scope = trio.CancelScope()

    def insert(connection: sqlite3.Connection) -> None:
        insert_one(connection)
        trio.from_thread.run_sync(scope.cancel, trio_token=token)
        connection.execute("INSERT INTO numbers VALUES (2)")

    token = trio.lowlevel.current_trio_token()
    async with open_database(tmp_path / "database", SCHEMA) as database:
        with scope:
            await database.run(insert)
        assert scope.cancelled_caught
        assert await database.run(numbers) == [1, 2]


async def test_only_one_process_uses_a_database_and_a_killed_one_leaves_its_commits(tmp_path):
    path = tmp_path / "database"
    command = [sys.executable, "-c", HOLDER, str(path)]
    holder = await trio.lowlevel.open_process(command, stdout=subprocess.PIPE)
    async with holder.stdout:
        printed = b""
        while not printed.endswith(b"\n"):
            printed += await holder.stdout.receive_some()
        assert printed == b"open\n"
        with pytest.raises(StorageInUseError, match="in use by another process"):
            async with open_database(path, SCHEMA):
                raise AssertionError
        holder.send_signal(signal.SIGKILL)
        await holder.wait()
    async with open_database(path, SCHEMA) as database:
        assert await database.run(numbers) == [7]


def replace(path):
    shutil.copy(path, path.with_suffix(".new"))
    path.with_suffix(".new").replace(path)


@pytest.mark.parametrize(
    "change",
    [
        lambda path: path.unlink(),
        replace,
        lambda path: path.with_name("database-wal").unlink(),
        lambda path: path.parent.rename(path.parent.with_name("elsewhere")),
    ],
    ids=["removed", "replaced", "its log removed", "its folder renamed"],
)
async def test_nothing_is_committed_to_a_database_that_is_no_longer_at_its_path(tmp_path, change):
    """What would be unknown after the next open is refused, and is there if it is written again after that."""
    path = tmp_path / "folder" / "database"
    path.parent.mkdir()
    async with open_database(path, SCHEMA) as database:
        await database.run(numbers)
        change(path)
        assert not database.replaced.is_set()
        for transaction in (insert_one, numbers):
            with pytest.raises(StorageLostError, match=f"{path} was removed or replaced"):
                await database.run(transaction)
        assert database.replaced.is_set()
    path.parent.mkdir(exist_ok=True)
    async with open_database(path, SCHEMA) as database:
        assert await database.run(numbers) == []
        await database.run(insert_one)
    async with open_database(path, SCHEMA) as database:
        assert await database.run(numbers) == [1]


@pytest.mark.parametrize("content", [b"no database at all, but some text that is longer than a header" * 40, None])
async def test_a_file_that_is_no_database_is_an_error_with_its_path(tmp_path, content):
    path = tmp_path / "database"
    if content is None:
        path.mkdir()
    else:
        path.write_bytes(content)
    with pytest.raises(StorageError, match=str(path)):
        async with open_database(path, SCHEMA):
            raise AssertionError


async def test_a_full_disk_is_an_error_and_nothing_that_was_committed_is_lost(tmp_path, small_disk):
    path = small_disk / "database"
    async with open_database(path, SCHEMA + "; CREATE TABLE IF NOT EXISTS bytes (value BLOB)") as database:
        await database.run(insert_one)
        with pytest.raises(StorageFullError, match=r"full"):
            await database.run(lambda connection: connection.execute("INSERT INTO bytes VALUES (zeroblob(8000000))"))
        assert await database.run(numbers) == [1]
        await database.run(lambda connection: connection.execute("INSERT INTO numbers VALUES (2)"))
        assert await database.run(numbers) == [1, 2]
