"""A disk that is soon full."""

import subprocess

import pytest


@pytest.fixture
def small_disk(tmp_path):
    """Return a folder on a disk of 2 MiB. Skips where no file system may be mounted."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("no file system may be mounted here")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)
