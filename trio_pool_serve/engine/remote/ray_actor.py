"""The Ray actor of a replica: it runs the engine process as its child on the node that Ray has chosen."""

import socket
import time
from concurrent.futures import Future
from contextlib import suppress

import msgspec
import trio
from attrs import define, field

from trio_pool_serve.engine.remote.connectors import HostAddress
from trio_pool_serve.engine.remote.engine_job import MODULE, EngineJob, EngineStatus, Leave, Loaded, LoadFailed
from trio_pool_serve.processes.child_process import BACKLOG, ChildProcess, open_child
from trio_pool_serve.telemetry.snapshots import Snapshot

THREADS = 5
"""``run`` has one for as long as the actor lives; the others are for calls that come meanwhile."""


class Started(msgspec.Struct):
    """The engine process is ready at an ``address``: ``Runner.describe()``."""

    address: str
    description: str
    pid: int


class SentSnapshot(msgspec.Struct):
    """A snapshot that the engine process has sent at a time of this node's clock."""

    at: float
    snapshot: Snapshot


@define(eq=False)
class EngineChild:
    """The engine process of an actor, which Trio watches in one of the actor's threads."""

    threads: int
    """With which the engine process computes."""
    started: Future[Started | LoadFailed | None] = field(factory=Future)
    """Set once the engine process is ready or has ended."""
    snapshot: SentSnapshot | None = None
    _child: ChildProcess[EngineStatus] | None = None
    _token: trio.lowlevel.TrioToken | None = None

    async def run(self, job: EngineJob, host: str) -> str:
        """Run an engine process that listens on a free port of ``host``; return how it has ended, for the log.

        Cancellation: it is killed unless it exits in time.
        """
        self._token = trio.lowlevel.current_trio_token()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.create_server((host, 0), family=family, backlog=BACKLOG) as listening:
            listening.setblocking(False)  # noqa: FBT003  (the standard library's own signature)
            address = HostAddress(host, listening.getsockname()[1])
            job.fd = listening.fileno()
            environment = {"OMP_NUM_THREADS": str(self.threads)}  # as many as CPUs are reserved, whatever the node has
            async with open_child(MODULE, job, EngineStatus, fds=[job.fd], environment=environment) as self._child:
                while (status := await self._child.status()) is not None:
                    match status:
                        case Loaded(description):
                            self.started.set_result(Started(str(address), description, self._child.process.pid))
                        case LoadFailed():
                            self.started.set_result(status)
                        case Snapshot():
                            self.snapshot = SentSnapshot(time.monotonic(), status)
                return await self._child.wait()

    def leave(self) -> None:
        """Have the engine process compute what it has, and exit. Callable in other threads, which it blocks."""
        if self._child is not None and self._token is not None:
            with suppress(trio.BrokenResourceError, trio.ClosedResourceError, trio.RunFinishedError):
                trio.from_thread.run(self._child.channel.send, Leave(), trio_token=self._token)


class EngineActor:
    """An actor with several threads; Ray would run one with a coroutine on a single thread, with asyncio.

    The engine process exits when its channel closes: it does not outlive the actor, however that ends.
    """

    def __init__(self, threads: int) -> None:
        self._child = EngineChild(threads)

    def node(self) -> str:
        """Return the id of the node."""
        import ray

        node: str = ray.get_runtime_context().get_node_id()
        return node

    def run(self, job: EngineJob) -> str:
        """Run an engine process, and return a phrase for the log that says how it has ended. Blocks until then."""
        import ray

        try:
            return trio.run(self._child.run, job, ray.util.get_node_ip_address())
        finally:
            if not self._child.started.done():
                self._child.started.set_result(None)

    def started(self) -> Started | LoadFailed | None:
        """Return where the engine process listens, or why it does not; ``None`` if it has died. Blocks until then."""
        return self._child.started.result()

    def snapshot(self) -> SentSnapshot | None:
        """Return the last snapshot of the engine process, if there was one."""
        return self._child.snapshot

    def leave(self) -> None:
        """Have the engine process compute what it has, and exit; ``run`` returns then."""
        self._child.leave()
