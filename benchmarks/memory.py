"""How much memory the processes of a server take."""

import re
from collections import Counter
from pathlib import Path

from attrs import frozen

from benchmarks.thread_clocks import PROC, process_tree


@frozen
class ProcessMemory:
    """One process. Of what several share, ``pss_mib`` has its share and ``rss_mib`` all.

    ``anonymous_mib`` is the share without files.
    """

    pid: int
    command: str
    rss_mib: float
    pss_mib: float
    anonymous_mib: float


def memory_of(pid: int) -> list[ProcessMemory]:
    """Return the memory of a process and of all it has started, itself first."""
    found = [_read(one) for one in process_tree(pid)]
    return [memory for memory in found if memory is not None]


def _read(pid: int) -> ProcessMemory | None:
    """Return the memory of a process; ``None`` if it has ended meanwhile."""
    try:
        lines = (PROC / str(pid) / "smaps_rollup").read_text().splitlines()[1:]
        words = (PROC / str(pid) / "cmdline").read_bytes().decode(errors="replace").rstrip("\0").split("\0")
    except (FileNotFoundError, ProcessLookupError):
        return None
    kib = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines)}
    # What it runs, not where that lies.
    command = " ".join([Path(words[0]).name, *words[1:3]])
    return ProcessMemory(pid, command, kib["Rss"] / 1024, kib["Pss"] / 1024, kib["Pss_Anon"] / 1024)


MAPPING = re.compile(r"[0-9a-f]+-[0-9a-f]+ (\S+) \S+ \S+ \d+ *(.*)")


def memory_by_holder(pid: int) -> dict[str, float]:
    """Return what holds the memory (PSS) of a process and of all it has started: MiB by holder."""
    kib: Counter[str] = Counter()
    for one in process_tree(pid):
        holder = ""
        for line in (PROC / str(one) / "smaps").read_text().splitlines():
            if mapping := MAPPING.fullmatch(line):
                holder = _holder(*mapping.groups())
            elif line.startswith("Pss:"):
                kib[holder] += int(line.split()[1])
    return {holder: found / 1024 for holder, found in kib.most_common()}


def _holder(access: str, path: str) -> str:
    if not path.startswith("/"):
        return "compiled kernels" if "x" in access else "heap"
    if path.endswith(".bin"):
        return "mapped weights"
    return "OpenVINO's libraries" if "/openvino/" in path else "Python and other libraries"
