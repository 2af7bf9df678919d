"""Real server processes, started and stopped."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import IO

import httpx
import trio
from attrs import frozen

from benchmarks.model import MODEL_NAME, MODEL_PATH

ROOT = Path(__file__).parent.parent

READY_TIMEOUT_S = 300.0

STOP_TIMEOUT_S = 40.0
"""More than the drain timeout of ``trio-pool-serve``."""


class ServerFailedError(Exception):
    """A server process has ended by itself; carries the end of its log."""


@frozen
class Server:
    """A server process, and where it listens."""

    name: str
    port: int
    pid: int = 0

    @property
    def url(self) -> str:
        """Where clients find it."""
        return f"http://127.0.0.1:{self.port}"


def free_port() -> int:
    """Return a TCP port that is free at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@asynccontextmanager
async def open_process(
    name: str,
    command: Sequence[str],
    port: int,
    *,
    cwd: Path = ROOT,
    environment: Mapping[str, str] | None = None,
    log: Path | None = None,
) -> AsyncIterator[Server]:
    """Run a server process for as long as the block, inside which it may not listen yet.

    ``environment`` is added to the variables of this process. The output of the server goes to the file ``log``.

    Leaving the block sends SIGTERM and waits. If the process ends before, ``ServerFailedError`` cancels the
    block and is raised, within an ``ExceptionGroup``.
    """
    async with trio.open_nursery() as nursery:
        process = await nursery.start(_run, name, command, cwd, {**os.environ, **(environment or {})}, log)
        yield Server(name, port, process.pid)
        nursery.cancel_scope.cancel(reason="the block is left")


async def _run(
    name: str,
    command: Sequence[str],
    cwd: Path,
    environment: Mapping[str, str],
    path: Path | None,
    *,
    task_status: trio.TaskStatus[trio.Process],
) -> None:
    with tempfile.TemporaryFile() if path is None else path.open("w+b") as log:
        await trio.run_process(
            command,
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=cwd,
            env=environment,
            check=False,
            deliver_cancel=_terminate,
            task_status=task_status,
        )
        raise ServerFailedError(f"{name} has ended; the end of its log:\n{_tail(log)}")


async def _terminate(process: trio.Process) -> None:
    process.send_signal(signal.SIGTERM)
    await trio.sleep(STOP_TIMEOUT_S)
    process.kill()


def _tail(log: IO[bytes]) -> str:
    log.seek(0)
    return "\n".join(log.read().decode(errors="replace").splitlines()[-20:])


async def wait_for_ok(url: str, *, every_s: float = 0.02) -> None:
    """Wait until ``url`` answers 200. Cancellation: at once; there is no limit otherwise."""
    async with httpx.AsyncClient(trust_env=False) as client:
        while not await _is_ok(client, url):  # noqa: ASYNC110  (another process: there is no event)
            await trio.sleep(every_s)


async def _is_ok(client: httpx.AsyncClient, url: str) -> bool:
    try:
        answer = await client.get(url)
    except httpx.TransportError:
        return False  # the server does not listen yet
    return answer.status_code == httpx.codes.OK


@asynccontextmanager
async def open_server(name: str, module: Sequence[str], *, ready_path: str, cwd: Path = ROOT) -> AsyncIterator[Server]:
    """Run ``python -m MODULE… --port N`` of the checkout ``cwd``; it is ready inside the block.

    Raises ``TooSlowError`` if it never is.
    """
    port = free_port()
    async with open_process(name, module_command(module, port), port, cwd=cwd) as server:
        with trio.fail_after(READY_TIMEOUT_S):
            await wait_for_ok(server.url + ready_path)
        yield server


def module_command(module: Sequence[str], port: int) -> list[str]:
    """Return the command of ``python -m MODULE… --port N``."""
    return [sys.executable, "-m", *module, "--port", str(port)]


def open_ours(*more: str) -> AbstractAsyncContextManager[Server]:
    """Run ``trio-pool-serve serve`` as it comes, with ``more`` models and flags."""
    return open_server("ours", ["trio_pool_serve", "serve", *_arguments(more)], ready_path="/readyz")


def open_on_loop(*more: str) -> AbstractAsyncContextManager[Server]:
    """Run ours with everything on the event loop, with ``more`` models and flags."""
    return open_server("on the loop", ["benchmarks.on_loop", *_arguments(more)], ready_path="/readyz")


def _arguments(more: Sequence[str]) -> list[str]:
    return [f"{MODEL_NAME}={MODEL_PATH}", *more]


def open_idle() -> AbstractAsyncContextManager[Server]:
    """Run a server with nothing to do."""
    return open_server("idle", ["benchmarks.idle"], ready_path="/health")
