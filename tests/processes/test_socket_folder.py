"""Folders of sockets are private, and those of servers that were killed are removed."""

import os
import signal
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from trio_pool_serve.processes.socket_folder import ABANDONED_S, PREFIX, SocketFolder

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


def age(folder: Path) -> None:
    then = folder.stat().st_mtime - 2 * ABANDONED_S
    os.utime(folder, (then, then))


def test_the_next_start_removes_the_folder_of_a_server_that_was_killed(parent):
    """Not that of one that lives, or a young one, which its owner may not have locked yet."""
    with subprocess.Popen(
        [sys.executable, "-c", MAKES_ONE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        folder = Path(process.stdout.readline().strip())
        (folder / "engine.sock").touch()
        age(folder)
        with SocketFolder():
            assert folder.exists(), "its owner lives"
        process.send_signal(signal.SIGKILL)
    with SocketFolder() as own:
        assert not folder.exists()
        young = parent / f"{PREFIX}young"
        young.mkdir()
        with SocketFolder():
            assert young.exists()
            assert Path(own).exists()
    assert list(parent.iterdir()) == [young]


def test_only_its_user_can_enter_it(parent):
    with SocketFolder() as folder:
        assert stat.S_IMODE(Path(folder).stat().st_mode) == 0o700


def test_a_link_in_its_place_is_not_followed(parent):
    elsewhere = parent / "elsewhere"
    elsewhere.mkdir()
    age(elsewhere)
    (parent / f"{PREFIX}link").symlink_to(elsewhere)
    with SocketFolder():
        assert elsewhere.exists()
