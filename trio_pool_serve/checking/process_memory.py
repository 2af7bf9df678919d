"""The most memory that this process has had, from Linux's /proc."""

from contextlib import suppress
from pathlib import Path

STATUS = Path("/proc/self/status")
PEAK = Path("/proc/self/clear_refs")

RESET_PEAK = "5"
"""What sets the peak to what is resident now: proc(5)."""


def peak_bytes() -> int:
    """Return the most bytes that were resident since ``reset_peak``."""
    (line,) = (line for line in STATUS.read_text().splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


def reset_peak() -> None:
    """Begin to look for the peak anew; where the kernel does not allow it, the peak is that of the whole process."""
    with suppress(OSError):
        PEAK.write_text(RESET_PEAK)
