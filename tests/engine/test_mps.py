"""Whether an MPS control daemon is there: its socket, a real one."""

import os
import socket
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from trio_pool_serve.engine import gpus
from trio_pool_serve.engine.gpus import mps_directory

pytestmark = pytest.mark.unit


@pytest.fixture
def directory():
    """One with a short name, as a socket's path has at most 107 bytes."""
    with TemporaryDirectory() as name:
        yield Path(name)


def test_a_daemon_has_a_socket_in_its_directory(directory):
    environment = {"CUDA_MPS_PIPE_DIRECTORY": str(directory)}
    assert mps_directory(environment) is None
    with socket.socket(socket.AF_UNIX) as control:
        control.bind(str(directory / "control"))
        assert mps_directory(environment) == directory


def test_a_pipe_does_as_well_and_a_file_does_not(directory):
    environment = {"CUDA_MPS_PIPE_DIRECTORY": str(directory)}
    (directory / "control").touch()
    assert mps_directory(environment) is None
    (directory / "control").unlink()
    os.mkfifo(directory / "control")
    assert mps_directory(environment) == directory


def test_the_default_directory_is_nvidias(directory, monkeypatch):
    monkeypatch.setattr(gpus, "MPS_PIPE_DIRECTORY", str(directory))
    os.mkfifo(directory / "control")
    assert mps_directory({}) == mps_directory({"CUDA_MPS_PIPE_DIRECTORY": ""}) == directory


@pytest.mark.parametrize("name", ["/nowhere", "x" * 5000, "/proc/1/cwd", "/dev/null"])
def test_a_directory_that_cannot_be_read_has_no_daemon(name):
    assert mps_directory({"CUDA_MPS_PIPE_DIRECTORY": name}) is None
