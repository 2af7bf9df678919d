"""Machines with GPUs, as far as an ``nvidia-smi`` on their ``PATH`` goes."""

from pathlib import Path

MODEL = "NVIDIA H100 80GB HBM3"
UUIDS = [f"GPU-{number:08x}-d72c-4106-c12f-20bd9faed9f6" for number in range(0xA0, 0xA8)]
LABELS = [f"cuda:{uuid[:12]}" for uuid in UUIDS]
EIGHT = "".join(f"GPU {number}: {MODEL} (UUID: {uuid})\n" for number, uuid in enumerate(UUIDS))


def write_nvidia_smi(folder: Path, script: str) -> Path:
    """Write an executable ``nvidia-smi`` that runs a shell script; return the folder, which ``PATH`` is to have."""
    folder.mkdir(exist_ok=True)
    path = folder / "nvidia-smi"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return folder


def printing(listing: str) -> str:
    """Return the script that prints a listing for ``-L``, and nothing else that could be taken for one."""
    return f"[ \"$*\" = -L ] || exit 2\ncat <<'END'\n{listing}END"
