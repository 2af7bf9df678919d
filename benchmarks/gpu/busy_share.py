"""The share of time in which a GPU is busy, as nvidia-smi samples it.

nvidia-smi counts a GPU as busy while any kernel runs, however small.
"""

import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from datetime import datetime
from functools import partial
from statistics import mean

import trio
from attrs import define, field

from benchmarks.gpu.selected_gpu import SelectedGpu

EVERY_MS = 200


@define
class BusyShare:
    """Samples of a GPU's busy share, percent, by the time at which nvidia-smi took them, seconds since the epoch.

    ``problem`` says why there are none.
    """

    samples: list[tuple[float, float]] = field(factory=list)
    problem: str = ""

    def between(self, began: float, ended: float) -> float | None:
        """Return the mean of the samples taken between two times; ``None`` without any."""
        taken = [share for at, share in self.samples if began <= at <= ended]
        return mean(taken) if taken else None

    def add(self, line: str) -> None:
        """Add a line of nvidia-smi: a local time, and a share. It has no share for part of a GPU (MIG)."""
        at, _, share = line.partition(",")
        try:
            self.samples.append((datetime.strptime(at.strip(), TIME_FORMAT).timestamp(), float(share)))
        except ValueError:
            self.problem = f"nvidia-smi: {line.strip()}"


TIME_FORMAT = "%Y/%m/%d %H:%M:%S.%f"


@asynccontextmanager
async def watch(gpu: SelectedGpu | None) -> AsyncIterator[BusyShare]:
    """Sample a GPU's busy share for as long as the block; not without a GPU or nvidia-smi."""
    busy = BusyShare()
    if gpu is None:
        busy.problem = "there is no GPU"
        yield busy
        return
    command = ["nvidia-smi", "--query-gpu=timestamp,utilization.gpu", "--format=csv,noheader,nounits"]
    command += ["-i", gpu.nvidia_smi_id, "-lms", str(EVERY_MS)]
    async with trio.open_nursery() as nursery:
        try:
            start = partial(trio.run_process, command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
            process = await nursery.start(start)
        except OSError as error:
            busy.problem = f"nvidia-smi: {error}"
        else:
            nursery.start_soon(_read_samples, process, busy)
        yield busy
        nursery.cancel_scope.cancel(reason="enough was seen")


async def _read_samples(process: trio.Process, busy: BusyShare) -> None:
    assert process.stdout is not None
    rest = b""
    with suppress(trio.ClosedResourceError):
        async for part in process.stdout:
            *lines, rest = (rest + part).split(b"\n")
            for line in filter(None, lines):
                busy.add(line.decode(errors="replace"))
