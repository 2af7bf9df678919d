"""The GPU that ``--device`` means, as nvidia-smi knows it; ``python -m benchmarks.gpu.selected_gpu`` asks torch.

Torch counts only the GPUs of ``CUDA_VISIBLE_DEVICES``, fastest first; nvidia-smi counts all of them, by their place on
the bus. Both know their UUIDs.
"""

import itertools
import os
import subprocess
from typing import Any

import attrs
import trio
from attrs import frozen

from benchmarks.gpu.part_process import read_job, run_part_process, send_finding


class NoGpuError(Exception):
    """There is no such GPU here, or torch cannot use it; says why."""


@frozen(kw_only=True)
class SelectedGpu:
    """A GPU. ``nvidia_smi_id`` is its id for nvidia-smi; ``driver`` is empty without nvidia-smi."""

    name: str
    nvidia_smi_id: str
    memory_gib: float
    capability: str
    multiprocessors: int
    cuda: str
    driver: str = ""


def visible_id(device: str, visible: str | None) -> str:
    """Return what ``CUDA_VISIBLE_DEVICES`` calls a device of torch: an index among all GPUs, or a UUID.

    Without that variable, it is the device's own index. CUDA ignores the first id that is not valid and all behind it.
    Raises ``NoGpuError`` if there are fewer.
    """
    position = int(device.partition(":")[2] or 0)
    if visible is None:
        return str(position)
    ids = list(itertools.takewhile(lambda one: one not in ("", "-1"), map(str.strip, visible.split(","))))
    if position >= len(ids):
        raise NoGpuError(f"{device}: CUDA_VISIBLE_DEVICES={visible} has {len(ids)} GPUs")
    return ids[position]


def nvidia_smi_id(device: str, uuid: str, visible: str | None) -> str:
    """Return the id for nvidia-smi: the UUID that torch knows; without, and for part of a GPU (MIG), its id."""
    selected = visible_id(device, visible)
    if selected.startswith("MIG-") or not uuid:
        return selected
    return uuid if uuid.startswith("GPU-") else f"GPU-{uuid}"


async def find_gpu(device: str) -> SelectedGpu:
    """Return the GPU, of which a process of its own has asked torch: here, it would keep memory of the GPU.

    Raises ``NoGpuError``. Cancellation: the process is terminated.
    """
    answers: list[dict[str, Any]] = []
    await run_part_process("benchmarks.gpu.selected_gpu", {"device": device}, answers.append)
    (answer,) = answers
    if "reason" in answer:
        raise NoGpuError(answer["reason"])
    uuid = answer.pop("uuid")
    known_by = nvidia_smi_id(device, uuid, os.environ.get("CUDA_VISIBLE_DEVICES"))
    return SelectedGpu(nvidia_smi_id=known_by, driver=await _driver(known_by), **answer)


async def _driver(known_by: str) -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "-i", known_by]
    try:
        done = await trio.run_process(command, capture_stdout=True, stderr=subprocess.DEVNULL)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return done.stdout.decode().strip()


def _ask_torch(device: str) -> dict[str, Any]:
    import torch

    if torch.version.cuda is None:
        return {"reason": f"torch {torch.__version__} was built without CUDA"}
    if not torch.cuda.is_available():
        return {"reason": f"torch {torch.__version__} sees no GPU"}
    index = torch.device(device).index or 0
    if index >= torch.cuda.device_count():
        return {"reason": f"{device}: {torch.cuda.device_count()} GPUs are usable here"}
    properties = torch.cuda.get_device_properties(index)
    return {
        "name": properties.name,
        "uuid": str(getattr(properties, "uuid", "")),
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "cuda": torch.version.cuda,
    }


def description(gpu: SelectedGpu | None) -> dict[str, Any] | None:
    """Return a GPU for JSON."""
    return None if gpu is None else attrs.asdict(gpu)


if __name__ == "__main__":
    asked = read_job()
    answer = _ask_torch(asked["device"])
    if asked.get("computes") and "reason" not in answer:
        import torch

        torch.ones(1, device=asked["device"]).item()
    send_finding(answer)
