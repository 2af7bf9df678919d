"""What a result was measured on and with."""

import datetime as dt
import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

PACKAGES = (
    "trio-pool-serve", "trio", "quart", "quart-trio", "hypercorn", "h11", "msgspec", "orjson", "pybase64", "numpy",
    "torch", "transformers", "tokenizers", "openvino",
)  # fmt: skip


def describe_machine() -> dict[str, Any]:
    """Return the machine, the versions and the moment, ready for JSON."""
    return {
        "measured": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
        "load_average_before": os.getloadavg()[0],
        "system": platform.platform(),
        "python": platform.python_version(),
        "commit": _commit(),
        "packages": {name: version for name in PACKAGES if (version := _version(name))},
    }


def _version(package: str) -> str:
    """Return the version of a package; empty if it is not installed, as OpenVINO on a machine with a GPU."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def stolen_s() -> float:
    """Return the CPU time, seconds since the machine started, that other virtual machines of its host have taken."""
    return int(Path("/proc/stat").read_text().split()[8]) / os.sysconf("SC_CLK_TCK")


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


def _commit() -> str:
    """Return the commit, with ``-dirty`` if the tree has changes other than results."""
    commit = _git("describe", "--always", "--abbrev=12")
    changes = _git("status", "--porcelain", "--untracked-files=no", "--", ":/", ":(top,exclude)benchmarks/results")
    return f"{commit}-dirty" if changes else commit or "unknown"


def _git(*arguments: str) -> str:
    completed = subprocess.run(
        ["git", *arguments], cwd=Path(__file__).parent, capture_output=True, text=True, check=False
    )
    return completed.stdout.strip()
