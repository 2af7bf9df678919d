"""Folders of sockets are private, and those of servers that were killed are removed."""

import fcntl
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

import pytest
import trio

from tests.server.server_process import until
from trio_pool_serve.processes import socket_folder
from trio_pool_serve.processes.socket_folder import PREFIX, SocketFolder, is_private, serve_at

MAKES_ONE = """
from trio_pool_serve.processes.socket_folder import SocketFolder
folder = SocketFolder()
print(folder.name, flush=True)
input()
"""


@pytest.fixture
def parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


def test_the_next_start_removes_the_folder_of_a_server_that_was_killed(parent):
    """At once, but not that of one that lives."""
    with subprocess.Popen(
        [sys.executable, "-c", MAKES_ONE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        folder = Path(process.stdout.readline().strip())
        (folder / "engine.sock").touch()
        with SocketFolder():
            assert folder.exists(), "its owner lives"
        process.send_signal(signal.SIGKILL)
    with SocketFolder() as own:
        assert not folder.exists()
        with SocketFolder():
            assert Path(own).exists()
    assert list(parent.iterdir()) == []


def test_a_folder_that_another_start_removes_before_it_is_locked_is_replaced(parent, monkeypatch):
    flock, others = fcntl.flock, []

    def flock_after_another_start(folder: int, operation: int) -> None:
        if not others:
            others.append(parent)
            with SocketFolder():
                others.extend(parent.iterdir())
        flock(folder, operation)

    monkeypatch.setattr(fcntl, "flock", flock_after_another_start)
    with SocketFolder() as own:
        assert len(others) == 2, "the other start has removed ours, and made its own"
        assert [*parent.iterdir()] == [Path(own)]
        assert is_left_alone(Path(own))
    assert list(parent.iterdir()) == []


def is_left_alone(folder: Path) -> bool:
    """Return whether it is private, and the start of another server does not remove it."""
    with SocketFolder():
        return folder.exists() and stat.S_IMODE(folder.stat().st_mode) == 0o700


async def test_a_folder_that_was_removed_is_made_again_and_is_its_owners(parent, monkeypatch):
    monkeypatch.setattr(socket_folder, "CHECK_S", 0.01)
    own = SocketFolder()
    with own:
        folder = Path(own.name)
        assert is_left_alone(folder)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(own.keep)
            for removed in (folder, folder, parent):
                shutil.rmtree(removed)
                await until(folder.exists)
            nursery.cancel_scope.cancel()
        assert is_left_alone(folder)
    assert list(parent.iterdir()) == []


async def test_a_socket_that_was_removed_is_bound_again_and_earlier_connections_stay(parent, monkeypatch):
    monkeypatch.setattr(socket_folder, "CHECK_S", 0.01)
    path = parent / "socket"

    async def echo(stream: trio.SocketStream) -> None:
        async for received in stream:
            await stream.send_all(received)

    async def ask(stream: trio.SocketStream) -> bytes:
        await stream.send_all(b"?")
        return await stream.receive_some()

    async with trio.open_nursery() as nursery:
        await nursery.start(serve_at, path, partial(trio.serve_listeners, echo))
        async with await trio.open_unix_socket(path) as first:
            path.unlink()
            await until(path.exists)
            async with await trio.open_unix_socket(path) as second:
                assert [await ask(stream) for stream in (first, second)] == [b"?", b"?"]
        nursery.cancel_scope.cancel()
    assert not path.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs another user")
def test_a_folder_that_another_user_has_made_is_not_private(parent):
    assert is_private(parent)
    assert not is_private(parent / "missing")
    os.chown(parent, 54321, -1)
    assert not is_private(parent)


def test_a_link_in_its_place_is_not_followed(parent):
    elsewhere = parent / "elsewhere"
    elsewhere.mkdir()
    (parent / f"{PREFIX}link").symlink_to(elsewhere)
    with SocketFolder():
        assert elsewhere.exists()
