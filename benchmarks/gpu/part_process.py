"""A part's own process: its effects on the GPU and torch end with it."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from typing import IO, Any

import trio

from benchmarks.servers import ROOT

SHOWN_LINES = 12


class PartProcessError(Exception):
    """A part's process has failed; carries the end of what it wrote to standard error."""


async def run_part_process(
    module: str, job: Any, found: Callable[[dict[str, Any]], None], *, environment: Mapping[str, str] | None = None
) -> str:
    """Run ``python -m MODULE`` with ``job`` as JSON on standard input, and return what it writes to standard error.

    ``found`` is called with each line of JSON that it writes with ``send_finding``. Raises ``PartProcessError`` if it
    ends with another status than 0. Cancellation: the process is terminated, and killed after five seconds.
    """
    command = ["env", *(f"{name}={value}" for name, value in (environment or {}).items()), sys.executable, "-m", module]
    with tempfile.TemporaryFile() as complaints:
        async with trio.open_nursery() as nursery:

            async def run(*, task_status: trio.TaskStatus[trio.Process]) -> None:
                await trio.run_process(
                    command,
                    stdin=json.dumps(job).encode(),
                    stdout=subprocess.PIPE,
                    stderr=complaints,
                    cwd=ROOT,
                    check=False,
                    task_status=task_status,
                )

            process = await nursery.start(run)
            await _read_findings(process, found)
        written = _text(complaints)
    if process.returncode:
        end = "\n".join(written.splitlines()[-SHOWN_LINES:])
        last = written.strip().splitlines()[-1:] or ["it wrote nothing"]
        raise PartProcessError(f"{module} ended with status {process.returncode}: {last[0]}\n{end}")
    return written


async def _read_findings(process: trio.Process, found: Callable[[dict[str, Any]], None]) -> None:
    assert process.stdout is not None
    rest = b""
    async for part in process.stdout:
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            if line.startswith(FINDING):
                found(json.loads(line.removeprefix(FINDING)))


FINDING = b"\x1e"
"""The record separator of RFC 7464 begins a line that is a finding, and not something that a library has printed."""


def send_finding(finding: dict[str, Any]) -> None:
    """Send what was found to the process that has started this one."""
    sys.stdout.buffer.write(FINDING + json.dumps(finding).encode() + b"\n")
    sys.stdout.buffer.flush()


def read_job() -> Any:
    """Return what this process was told to do."""
    return json.load(sys.stdin)


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")
