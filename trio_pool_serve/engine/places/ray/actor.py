"""The Ray actor of a place: it runs the engine process as its child on the node that Ray has chosen."""

import time
from concurrent.futures import Future
from contextlib import suppress

import msgspec
import trio

from trio_pool_serve.engine.places.engine_job import MODULE, EngineJob, EngineStatus, Leave, Loaded, LoadFailed
from trio_pool_serve.engine.remote.connectors import HostAddress
from trio_pool_serve.processes.child_process import ChildProcess, open_child
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


class EngineActor:
    """An actor with several threads; it has no coroutine, with which Ray would run it on a single one, by asyncio.

    The engine process computes with ``threads`` threads, and exits when its channel closes: it does not outlive the
    actor, however that ends.
    """

    def __init__(self, threads: int) -> None:
        # As many as CPUs are reserved, whatever the node has.
        self.environment = {"OMP_NUM_THREADS": str(threads)}
        self.outcome: Future[Started | LoadFailed | None] = Future()
        """Set once the engine process is ready or has ended."""
        self.sent: SentSnapshot | None = None
        self.child: ChildProcess[EngineStatus] | None = None
        self.token: trio.lowlevel.TrioToken | None = None

    def node(self) -> str:
        """Return the id of the node."""
        import ray

        node: str = ray.get_runtime_context().get_node_id()
        return node

    def run(self, job: EngineJob) -> str:
        """Run an engine process, and return a phrase for the log that says how it has ended. Blocks until then."""
        import ray

        job.address = ray.util.get_node_ip_address()
        try:
            return trio.run(run_child, self, job)
        finally:
            if not self.outcome.done():
                self.outcome.set_result(None)

    def started(self) -> Started | LoadFailed | None:
        """Return where the engine process listens, or why it does not; ``None`` if it has died. Blocks until then."""
        return self.outcome.result()

    def snapshot(self) -> SentSnapshot | None:
        """Return the last snapshot of the engine process, if there was one."""
        return self.sent

    def leave(self) -> None:
        """Tell the engine process to compute what it has, and exit; ``run`` returns then."""
        if self.child is not None and self.token is not None:
            with suppress(trio.BrokenResourceError, trio.ClosedResourceError, trio.RunFinishedError):
                trio.from_thread.run(self.child.channel.send, Leave(), trio_token=self.token)


async def run_child(actor: EngineActor, job: EngineJob) -> str:
    """Run the engine process of an actor; return how it ends. Cancellation: it is killed unless it exits in time."""
    actor.token = trio.lowlevel.current_trio_token()
    async with open_child(MODULE, job, EngineStatus, environment=actor.environment) as actor.child:
        while (status := await actor.child.status()) is not None:
            match status:
                case Loaded(description, port):
                    address = str(HostAddress(job.address, port))
                    actor.outcome.set_result(Started(address, description, actor.child.process.pid))
                case LoadFailed():
                    actor.outcome.set_result(status)
                case Snapshot():
                    actor.sent = SentSnapshot(time.monotonic(), status)
        return await actor.child.wait()
