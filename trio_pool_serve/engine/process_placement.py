"""Where a server's models compute: in which processes, and how many batches at a time."""

import os
import re
import sys
from collections.abc import Mapping, Sequence
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path

from attrs import evolve

from trio_pool_serve.config import Config, ModelConfig, Placement
from trio_pool_serve.threads.dedicated_threads import HAS_IDLE_PRIORITY

MAX_REPLICAS = 4
"""Maximum default on CPU: each engine process takes the model's memory once more."""


def has_gpu(
    loading: ModelConfig,
    *,
    driver: Path = Path("/dev/nvidiactl"),
    environment: Mapping[str, str] = os.environ,
    import_path: Sequence[str] = sys.path,
) -> bool:
    """Return whether the model will be on a GPU, decided without importing torch.

    With ``--device auto`` this requires NVIDIA's driver, a GPU that ``CUDA_VISIBLE_DEVICES`` leaves visible, and a
    CUDA build of torch.
    """
    if loading.device != "auto":
        return loading.device.startswith("cuda")
    # CUDA reads the list up to the first entry that is not a device: "" and "-1" hide all GPUs.
    visible = re.match(r"\s*(\d|GPU-|MIG-)", environment.get("CUDA_VISIBLE_DEVICES", "0"))
    if visible is None or not driver.exists():
        return False
    torch = PathFinder.find_spec("torch", import_path)
    if torch is None or torch.origin is None:
        return False
    version = Path(torch.origin).with_name("version.py")
    # CPU builds contain the line "cuda: Optional[str] = None".
    return not (version.is_file() and re.search(r"^cuda\b.*=\s*None\b", version.read_text(), re.MULTILINE))


def replicas_of(config: Config, gpus: int = 1) -> int:
    """Return the maximum number of batches of each model computed at a time, each in its own thread or process.

    ``gpus`` is the number of GPUs for the models, if they are computed on GPUs. OpenVINO on a CPU may find that more
    are faster when it loads the model.
    """
    processes = config.processes
    if processes.replica_range is not None:
        return processes.replica_range[1]
    if processes.engine == "ray":
        return 1
    if has_gpu(config.loading):
        return gpus * (processes.replicas_per_gpu or 1)
    return min(MAX_REPLICAS, len(os.sched_getaffinity(0)))


def idle_launches_of(config: Config, processes: int = 1) -> int:
    """Return how many planned batches are computed at a time at idle priority: one on each core.

    0 if the system has no such priority, and in a process that computes nothing else. ``processes`` share the cores.
    """
    return max(1, len(os.sched_getaffinity(0)) // processes) if config.batch.is_served and HAS_IDLE_PRIORITY else 0


def with_replicas(config: Config, gpus: int) -> Config:
    """Return the settings with ``--replicas`` set, so that no other process needs to look for the GPUs."""
    return evolve(config, processes=evolve(config.processes, replicas=replicas_of(config, max(1, gpus))))


def default_placement(
    config: Config, *, reads_images: bool, by_numpy: bool = False, cores: int | None = None
) -> Placement:
    """Return the default of ``--engine``: the process that answers, if that does not slow it down.

    ``cores`` is the number of cores of this process. ``reads_images``: whether one of the models takes images;
    ``by_numpy``: whether NumPy computes all of them, in microseconds for each text.

    A forward pass by OpenVINO does not hold the interpreter lock, so the event loop runs beside it. A row that is not
    sent to another process takes 0.9 ms less CPU time (MiniLM, one client).
    """
    if config.hosts.engine_hosts:
        return "hosts"
    if config.processes.api_workers > 1:
        return "process"
    if config.model_changes.flag is not None:
        return "local"
    cores = len(os.sched_getaffinity(0)) if cores is None else cores
    all_by_openvino = not reads_images and all(
        each.loading.backend in ("auto", "openvino") and find_spec("openvino") is not None and not has_gpu(each.loading)
        for each in config.sources
    )
    return "local" if cores == 1 or by_numpy or all_by_openvino else "process"
