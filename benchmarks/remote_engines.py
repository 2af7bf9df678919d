"""Engines on another machine, which is a network namespace with a cable to this one. Needs the right to make those."""

import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import trio

from benchmarks.servers import READY_TIMEOUT_S, open_process, wait_for_ok

HERE, THERE = "10.213.78.1", "10.213.78.2"
CABLE = "tps-bench"
PORT, PROBE_PORT = 9000, 9001


class NoNamespacesError(Exception):
    """The kernel does not allow namespaces; carries its message."""


def _ip(*arguments: str) -> None:
    try:
        subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)
    except FileNotFoundError as error:
        raise NoNamespacesError("there is no `ip` here") from error
    except subprocess.CalledProcessError as error:
        raise NoNamespacesError(str(error.stderr).strip()) from error


@contextmanager
def open_machine() -> Iterator[str]:
    """Make a namespace with an address of its own; return its name. Raises ``NoNamespacesError``."""
    name = f"tps-bench-{os.getpid()}"
    _ip("netns", "add", name)
    try:
        _ip("link", "add", CABLE, "type", "veth", "peer", "name", CABLE, "netns", name)
        _ip("address", "add", f"{HERE}/24", "dev", CABLE)
        _ip("link", "set", CABLE, "up")
        _ip("-n", name, "address", "add", f"{THERE}/24", "dev", CABLE)
        _ip("-n", name, "link", "set", CABLE, "up")
        _ip("-n", name, "link", "set", "lo", "up")
        yield name
    finally:
        subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)
        subprocess.run(["ip", "link", "delete", CABLE], check=False, capture_output=True)


def cut(machine: str) -> None:
    """Cut the cable: neither end is told."""
    _ip("-n", machine, "link", "set", CABLE, "down")


def mend(machine: str) -> None:
    """Undo ``cut``."""
    _ip("-n", machine, "link", "set", CABLE, "up")


@asynccontextmanager
async def open_engine(machine: str, model: str, key_file: Path) -> AsyncIterator[str]:
    """Run ``trio-pool-serve engine`` there; the block has its address, once it computes."""
    program = [sys.executable, "-m", "trio_pool_serve", "engine", model, "--replicas", "1"]
    where = ["--listen", f"{THERE}:{PORT}", "--probe-listen", f"{THERE}:{PROBE_PORT}", "--key-file", str(key_file)]
    async with open_process("engine", ["ip", "netns", "exec", machine, *program, *where], PORT):
        with trio.fail_after(READY_TIMEOUT_S):
            await wait_for_ok(f"http://{THERE}:{PROBE_PORT}/readyz")
        yield f"{THERE}:{PORT}"
