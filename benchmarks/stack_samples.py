"""Stacks as py-spy samples them from outside a process, and the stage of a request that each belongs to."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import trio
from attrs import define, field, frozen

STAGES: tuple[tuple[str, str], ...] = (
    # The first match decides. A name after the colon is a function.
    ("trio_pool_serve/api/http/json_body.py:decode_json", "JSON"),
    ("trio_pool_serve/api/http/json_body.py", "JSON"),
    ("trio_pool_serve/api/fields/encodings.py", "encoding"),
    ("trio_pool_serve/api/fields/embedding_responses.py", "encoding"),
    ("trio_pool_serve/api/", "api"),
    ("trio_pool_serve/app.py", "api"),
    ("trio_pool_serve/tasks/", "tasks"),
    ("trio_pool_serve/service.py", "tasks"),
    ("trio_pool_serve/rendering/", "tokenising"),
    ("trio_pool_serve/engine/remote/", "process link"),
    ("trio_pool_serve/processes/worker_processes.py", "process link"),
    ("trio_parallel/", "process link"),
    ("_trio_parallel_workers/", "process link"),
    ("multiprocessing/", "process link"),
    ("trio_pool_serve/engine/", "engine"),
    ("trio_pool_serve/runner/forward_pass.py", "assembly"),
    ("trio_pool_serve/runner/heads/", "pooling"),
    ("trio_pool_serve/runner/output_copy.py", "pooling"),
    ("trio_pool_serve/runner/", "forward"),
    ("trio_pool_serve/telemetry/", "metrics"),
    ("prometheus_client/", "metrics"),
    ("trio_pool_serve/threads/offload.py", "thread hops"),
    ("trio_pool_serve/threads/dedicated_threads.py", "thread hops"),
    ("trio/_threads.py", "thread hops"),
    ("trio/_core/_thread_cache.py", "thread hops"),
    ("trio/_core/_entry_queue.py", "thread hops"),
    ("trio/_core/_wakeup_socketpair.py", "thread hops"),
    ("trio/_socket.py", "sockets"),
    ("trio/_highlevel_socket.py", "sockets"),
    ("trio/_core/_io_epoll.py", "epoll"),
    ("trio/", "trio"),
    ("trio_pool_serve/server/contained_connection.py", "HTTP"),
    ("trio_pool_serve/server/http_connection.py", "HTTP"),
    ("trio_pool_serve/server/exchange.py", "HTTP"),
    ("trio_pool_serve/server/incoming_request.py", "HTTP"),
    ("trio_pool_serve/server/outgoing_response.py", "HTTP"),
    ("h11/", "HTTP"),
    ("hypercorn/", "HTTP"),
    ("quart_trio/", "Quart"),
    ("quart/", "Quart"),
    ("flask/", "Quart"),
    ("werkzeug/", "Quart"),
    ("blinker/", "Quart"),
)
"""(prefix of a frame's file, stage): samples of such frames belong to that stage.

Libraries that many stages use are not here (torch, transformers, numpy, contextlib): their samples belong to
the caller's stage.
"""

WAITS = (
    "trio/_core/_io_epoll.py:EpollIOManager.get_events",
    "trio/_core/_thread_cache.py:WorkerThread._work",
    "trio/_core/_wakeup_socketpair.py:WakeupSocketpair.wakeup_thread_and_signal_safe",
    "trio_pool_serve/threads/dedicated_threads.py:_run_jobs",
    "selectors.py:_PollLikeSelector.select",
    "threading.py:Condition.wait",
)
"""Where threads wait for a core most: where they sleep, and have been woken, and where they wake the loop, whose
priority is higher than theirs."""

OTHER = "other"

FORWARD = "forward"

ORDER = (
    "HTTP", "sockets", "Quart", "trio", "epoll", "thread hops", "api", "JSON", "tasks", "tokenising", "engine",
    "process link", "assembly", "dispatch", "kernels", "pooling", "encoding", "metrics", OTHER,
)  # fmt: skip
"""The stages in the order of tables; ``forward`` becomes dispatch, which holds the interpreter lock, and kernels."""


THREAD = re.compile(r"(?:^|;)thread \((?P<id>\d+)\)(?:: (?P<name>[^;]*))?")

PACKAGES = (
    "/site-packages/",
    f"/{Path(__file__).parent.parent.name}/",
    f"/python{sys.version_info.major}.{sys.version_info.minor}/",
)
"""Folders that packages are in; the standard library's last, as the first is below it."""


class ProfilerFailedError(Exception):
    """py-spy is not installed, may not trace the process, or has ended early; the message is its output."""


@frozen
class Frame:
    """A Python function on a stack; ``file`` begins with the name of its package."""

    function: str
    file: str

    @classmethod
    def parse(cls, text: str) -> "Frame":
        """Read ``function (/path/to/package/module.py)``."""
        function, _, path = text.rpartition(" (")
        return cls(function, _below_packages(path.removesuffix(")")))

    @property
    def stage(self) -> str | None:
        """The stage it belongs to, if its file is in ``STAGES``."""
        for where, stage in STAGES:
            file, _, function = where.partition(":")
            if self.file.startswith(file) and (not function or self.function == function):
                return stage
        return None


def _below_packages(path: str) -> str:
    return next((path.rpartition(folder)[2] for folder in PACKAGES if folder in path), path)


@frozen
class Stack:
    """Where a thread was found, outermost frame first."""

    thread_id: int
    thread_name: str
    frames: tuple[Frame, ...]

    @classmethod
    def parse(cls, text: str) -> "Stack":
        """Read a stack of py-spy's raw format, made with ``--threads`` and perhaps ``--subprocesses``."""
        thread = THREAD.search(text)  # before it are processes, with command lines in which there may be anything
        if thread is None:
            raise ProfilerFailedError(f"no thread: {text!r}")
        frames = text[thread.end() :].split(";")[1:]
        return cls(int(thread["id"]), thread["name"] or "", tuple(map(Frame.parse, frames)))

    @property
    def stage(self) -> str:
        """The stage of the innermost frame that has one."""
        return next((stage for frame in reversed(self.frames) if (stage := frame.stage)), OTHER)

    @property
    def at_wait(self) -> bool:
        """Whether the thread is where it sleeps: falling asleep, or woken and not running yet."""
        return self.innermost in WAITS

    @property
    def innermost(self) -> str:
        """The innermost frame's file and function; empty if the stack could not be read."""
        return f"{self.frames[-1].file}:{self.frames[-1].function}" if self.frames else ""


def parse_stacks(raw: str) -> Counter[Stack]:
    """Return how often each stack was seen."""
    stacks: Counter[Stack] = Counter()
    for line in raw.splitlines():
        text, _, count = line.rpartition(" ")
        stacks[Stack.parse(text)] += int(count)
    return stacks


@define
class Recording:
    """What py-spy has seen; filled when it has ended."""

    stacks: Counter[Stack] = field(factory=Counter)


@asynccontextmanager
async def record_stacks(pid: int, *mode: str, rate: int) -> AsyncIterator[Recording]:
    """Sample a process and its children for as long as the block; ``mode`` are flags of py-spy.

    Threads that run, or wait for a core; with ``--gil`` those that hold the interpreter lock. Raises
    ``ProfilerFailedError``.
    """
    recording = Recording()
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "stacks"
        command = [_py_spy(), "record", "--pid", str(pid), "--output", str(output), "--format", "raw"]
        command += ["--threads", "--subprocesses", "--full-filenames", "--nolineno", "--rate", str(rate)]
        command += mode
        process = await trio.lowlevel.open_process(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        try:
            printed = await _wait_sampling(process)
            yield recording
            process.send_signal(signal.SIGINT)
            with trio.fail_after(60):
                await process.wait()
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        if not output.exists():
            raise ProfilerFailedError(printed)
        recording.stacks = parse_stacks(output.read_text())


def _py_spy() -> str:
    here = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    found = shutil.which("py-spy", path=here)
    if found is None:
        raise ProfilerFailedError("py-spy is not installed; it comes with the `bench` extra")
    return found


async def _wait_sampling(process: trio.Process) -> str:
    """Return the output of py-spy until it samples."""
    printed = ""
    assert process.stdout is not None
    async for part in process.stdout:
        printed += part.decode(errors="replace")
        if "Sampling process" in printed:
            return printed
    hint = "py-spy needs to trace the process: be root, or allow it with `sysctl kernel.yama.ptrace_scope=0`"
    raise ProfilerFailedError(f"{printed}\n{hint}")
