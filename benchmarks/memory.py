"""How much memory the processes of a server take."""

from collections.abc import Iterator
from pathlib import Path

from attrs import frozen

PROC = Path("/proc")


@frozen
class ProcessMemory:
    """One process. Of what several share, ``pss_mib`` has its share and ``rss_mib`` all."""

    pid: int
    command: str
    rss_mib: float
    pss_mib: float


def memory_of(pid: int) -> list[ProcessMemory]:
    """Return the memory of a process and of all it has started, in their order."""
    return [_read(one) for one in _family(pid)]


def _family(pid: int) -> Iterator[int]:
    yield pid
    for children in sorted((PROC / str(pid) / "task").glob("*/children")):
        for child in children.read_text().split():
            yield from _family(int(child))


def _read(pid: int) -> ProcessMemory:
    lines = (PROC / str(pid) / "smaps_rollup").read_text().splitlines()[1:]
    kib = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines)}
    command = (PROC / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    return ProcessMemory(pid, command, kib["Rss"] / 1024, kib["Pss"] / 1024)
