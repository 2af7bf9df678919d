"""NVIDIA's Multi-Process Service (MPS), with which several processes compute on one GPU at the same time."""

import os
from collections.abc import Mapping
from pathlib import Path

DEFAULT_PIPE_DIRECTORY = "/tmp/nvidia-mps"  # noqa: S108  (NVIDIA's)


def mps_directory(environment: Mapping[str, str] = os.environ) -> Path | None:
    """Return the directory in which an MPS control daemon has its socket; ``None`` if there is no such socket.

    CUDA connects to it in every process that inherits the environment. A daemon that was killed leaves its socket.
    """
    directory = Path(environment.get("CUDA_MPS_PIPE_DIRECTORY") or DEFAULT_PIPE_DIRECTORY)
    control = directory / "control"
    try:
        return directory if control.is_socket() or control.is_fifo() else None
    except OSError:  # a path that is too long, or a directory of another user
        return None
