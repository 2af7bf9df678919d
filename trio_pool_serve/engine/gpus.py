"""The NVIDIA GPUs that engine processes may compute on, found without importing torch."""

import errno
import logging
import os
import re
import shutil
import socket
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import trio
from attrs import frozen

from trio_pool_serve.config import ModelConfig
from trio_pool_serve.engine.process_placement import has_gpu
from trio_pool_serve.threads.offload import Offload

logger = logging.getLogger(__name__)

DRIVER_FOLDER = Path("/proc/driver/nvidia/gpus")

TIMEOUT_S = 15.0
"""Timeout of ``nvidia-smi``: without the persistence daemon it initialises every GPU first."""

EXIT_TIMEOUT_S = 1.0
"""Time for ``nvidia-smi`` to end after it was killed: while it waits for the driver, it cannot be."""

MAX_OUTPUT_BYTES = 64 * 1024
"""Maximum output of ``nvidia-smi``, which prints about 80 bytes for each device."""

MAX_INFORMATION_BYTES = 4096

MAX_NAME = 80

MPS_PIPE_DIRECTORY = "/tmp/nvidia-mps"  # noqa: S108  (NVIDIA's default)

GPU_UUID = re.compile(r"GPU-[0-9A-Fa-f-]{1,60}")
GPU_LINE = re.compile(rf"GPU ([0-9]{{1,4}}): (.+) \(UUID: ({GPU_UUID.pattern})\)")
MIG_LINE = re.compile(r"MIG (\S+)\s+Device\s+[0-9]+: \(UUID: (MIG-[0-9A-Za-z/-]{1,80})\)")
MIG_BY_INSTANCES = re.compile(rf"MIG-({GPU_UUID.pattern})/[0-9]{{1,3}}/[0-9]{{1,3}}")
"""A MIG device by its GPU's UUID, GPU instance and compute instance, which CUDA accepts besides its own UUID."""


@frozen
class Gpu:
    """A GPU, or a MIG device: a part of a GPU that CUDA treats as a device of its own."""

    number: int
    """The number of the whole GPU in ``nvidia-smi``: in the order of PCI addresses."""
    name: str
    uuid: str
    """The UUID as accepted by ``CUDA_VISIBLE_DEVICES``; empty if unknown."""
    whole_uuid: str
    """The UUID of the whole GPU."""

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables with which a process sees only this device, as ``cuda:0``."""
        return {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": self.uuid or str(self.number)}

    @property
    def label(self) -> str:
        """A short name for logs and metrics: ``cuda:GPU-8932f937``, or ``cuda:0`` if it has no UUID."""
        abbreviated = re.match(r"(GPU|MIG)-[0-9A-Fa-f]+(?=-)", self.uuid)
        return f"cuda:{abbreviated[0] if abbreviated else self.uuid or self.number}"

    def __str__(self) -> str:
        return f"{self.label} (GPU {self.number}, {self.name})"


async def find_gpus(
    loading: ModelConfig,
    *,
    environment: Mapping[str, str] = os.environ,
    driver_folder: Path = DRIVER_FOLDER,
    timeout_s: float = TIMEOUT_S,
) -> list[Gpu]:
    """Return the GPUs for ``--device`` among those that ``CUDA_VISIBLE_DEVICES`` leaves visible.

    ``nvidia-smi -L`` lists the machine's GPUs and MIG devices; if that fails, the driver's folder does. Empty if the
    device is the CPU, or if no GPU is found: torch then reports the reason. Cancellation: ``nvidia-smi`` is killed.
    """
    if not has_gpu(loading, environment=environment):
        return []
    gpus = parse_listing(await _run_nvidia_smi(environment, timeout_s))
    if not gpus:
        with trio.move_on_after(timeout_s) as limit:
            gpus = await Offload().run("load", lambda: read_driver_folder(driver_folder))
        if limit.cancelled_caught:
            logger.warning("the driver did not list its GPUs within %g s", timeout_s)
    visible = visible_among(gpus, environment.get("CUDA_VISIBLE_DEVICES"))
    chosen = loading.device.partition(":")[2]
    return visible[int(chosen) :][:1] if chosen else visible


# The text is parsed here rather than read by nvidia-ml-py: its import takes 75 ms in each server process, and its calls
# into the driver may hang in a thread that cannot be ended, whereas a process can be killed.
async def _run_nvidia_smi(environment: Mapping[str, str], timeout_s: float) -> str:
    """Return the output of ``nvidia-smi -L``, even if it fails; empty if it cannot be run or does not end in time."""
    output = bytearray()
    try:
        process = await trio.lowlevel.open_process(
            ["nvidia-smi", "-L"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=dict(environment),
        )
    except OSError as error:
        logger.debug("nvidia-smi cannot be run: %s", error)
        return ""
    assert process.stdout is not None  # noqa: S101  (it is a pipe)
    async with process.stdout:
        try:
            with trio.move_on_after(timeout_s) as limit:
                while len(output) < MAX_OUTPUT_BYTES and (part := await process.stdout.receive_some(4096)):
                    output += part
        finally:
            process.kill()  # it has printed all that counts, or has taken too long
            with trio.CancelScope(shield=True), trio.move_on_after(EXIT_TIMEOUT_S):
                await process.wait()
    if limit.cancelled_caught:
        logger.warning("nvidia-smi did not end within %g s; GPUs are read from the driver's list instead", timeout_s)
        return ""
    return output.decode(errors="replace")


def parse_listing(listing: str) -> list[Gpu]:
    """Return the devices in the output of ``nvidia-smi -L``; other lines are ignored.

    A GPU that is divided into MIG devices is replaced by these.
    """
    devices: dict[str, Gpu] = {}
    whole: Gpu | None = None
    for line in listing.splitlines():
        if gpu := GPU_LINE.fullmatch(line.strip()):
            whole = devices.setdefault(gpu[3], Gpu(int(gpu[1]), _printable(gpu[2]), gpu[3], gpu[3]))
        elif whole is not None and (mig := MIG_LINE.fullmatch(line.strip())):
            devices.setdefault(mig[2], Gpu(whole.number, f"{whole.name} MIG {_printable(mig[1])}", mig[2], whole.uuid))
    divided = {device.whole_uuid for device in devices.values() if device.uuid != device.whole_uuid}
    return [device for device in devices.values() if device.uuid not in divided]


def read_driver_folder(folder: Path) -> list[Gpu]:
    """Return the GPUs that the driver lists in ``/proc/driver/nvidia/gpus``. Blocking."""
    found: list[Gpu] = []
    try:
        for gpu in sorted(folder.iterdir()):  # by PCI address
            with (gpu / "information").open("rb") as file:
                lines = file.read(MAX_INFORMATION_BYTES).decode(errors="replace").splitlines()
            fields = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
            if fields.get("GPU Excluded", "No") == "No":
                # The UUID is question marks until the GPU has been used for the first time.
                uuid = fields.get("GPU UUID", "")
                uuid = uuid if GPU_UUID.fullmatch(uuid) else ""
                found.append(Gpu(len(found), _printable(fields.get("Model", "unknown model")), uuid, uuid))
    except OSError as error:
        logger.debug("the driver's list of GPUs cannot be read: %s", error)
    return found


def visible_among(gpus: Sequence[Gpu], variable: str | None) -> list[Gpu]:
    """Return the GPUs that ``CUDA_VISIBLE_DEVICES`` leaves visible, in its order; all if it is not set.

    As in CUDA, the list ends at the first entry that names no device or several, a device named twice hides all, and
    entries are either all numbers or all UUIDs, which may be abbreviated. An entry that names a GPU divided into MIG
    devices stands for all of them, since each process gets one.
    """
    if variable is None:
        return list(gpus)
    named: list[list[Gpu]] = []
    entries = [entry.strip() for entry in variable.split(",")]
    kind = entries[0][:4]
    for entry in entries:
        if kind in ("GPU-", "MIG-"):
            devices = _of_uuid(gpus, entry) if entry.startswith(kind) else []
        else:
            # Read as by strtoul: 1gpu is 1.
            digits = re.match(r"\+?0*([0-9]{1,9})", entry)
            devices = [gpu for gpu in gpus if digits and gpu.number == int(digits[1])]
        if not devices:
            break
        if devices in named:
            return []
        named.append(devices)
    return [gpu for devices in named for gpu in devices]


def _of_uuid(gpus: Iterable[Gpu], entry: str) -> list[Gpu]:
    """Return the devices that an entry names: one, or all MIG devices of one GPU; none if it names several."""
    if instances := MIG_BY_INSTANCES.fullmatch(entry):
        for gpu in gpus:
            if gpu.whole_uuid == instances[1] and gpu.uuid != gpu.whole_uuid:
                return [Gpu(gpu.number, gpu.name.partition(" MIG ")[0] + " MIG", entry, gpu.whole_uuid)]
    is_mig = entry.startswith("MIG-")
    devices = [gpu for gpu in gpus if (gpu.uuid if is_mig else gpu.whole_uuid).startswith(entry)]
    return devices if len({gpu.uuid if is_mig else gpu.whole_uuid for gpu in devices}) == 1 else []


def _printable(name: str) -> str:
    return "".join(character if character.isprintable() else "?" for character in name[:MAX_NAME])


def sharing_by_mps(environment: Mapping[str, str] = os.environ) -> str:
    """Say how replicas on the same GPU compute, and what to do if they take turns.

    Concurrently, if the control daemon of NVIDIA's Multi-Process Service (MPS) answers, to which CUDA connects in
    processes that inherit the environment. A daemon that has ended leaves its socket, and the process id in its
    directory may be of another container. So this connects, as CUDA does, and disconnects at once; the daemon logs it.
    """
    directory = environment.get("CUDA_MPS_PIPE_DIRECTORY") or MPS_PIPE_DIRECTORY
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as probe:
        try:
            probe.connect(f"{directory}/control")
        except OSError as error:
            # In these cases a process listens: its queue is full, or its socket is of another type.
            if error.errno not in (errno.EAGAIN, errno.EPROTOTYPE):
                is_installed = shutil.which("nvidia-cuda-mps-control", path=environment.get("PATH")) is not None
                return (
                    f"replicas on the same GPU take turns: no MPS control daemon answers at {directory} "
                    f"({error.strerror or error}). Start nvidia-cuda-mps-control -d "
                    f"{'before the server' if is_installed else 'on the host, and mount its directory here'}."
                )
    return f"replicas on the same GPU compute concurrently, by the MPS control daemon at {directory}"
