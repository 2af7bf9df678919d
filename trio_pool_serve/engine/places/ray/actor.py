"""The Ray actor of a place: it runs the engine process as its child on the node that Ray has chosen."""

import time
from contextlib import suppress
from queue import SimpleQueue

import trio

from trio_pool_serve.engine.places.engine_job import MODULE, EngineJob, EngineStatus, Leave, LoadFailed
from trio_pool_serve.processes.child_process import ChildProcess, open_child

THREADS = 5
"""``run`` has one for as long as the actor lives; the others are for calls that come meanwhile."""


class EngineActor:
    """An actor with several threads; it has no coroutine, with which Ray would run it on a single one, by asyncio.

    The engine process computes with ``threads`` threads, and exits when its channel closes: it does not outlive the
    actor, however that ends.
    """

    def __init__(self, threads: int) -> None:
        # As many as CPUs are reserved, whatever the node has.
        self.environment = {"OMP_NUM_THREADS": str(threads)}
        self.statuses: SimpleQueue[tuple[float, EngineStatus]] = SimpleQueue()
        self.child: ChildProcess[EngineStatus] | None = None
        self.token: trio.lowlevel.TrioToken | None = None

    def node(self) -> str:
        """Return the id of the node."""
        import ray

        node: str = ray.get_runtime_context().get_node_id()
        return node

    def run(self, job: EngineJob) -> tuple[str, str]:
        """Run an engine process; return how it has ended, and why its model could not be loaded, if that is why.

        Blocks until then.
        """
        import ray

        job.address = ray.util.get_node_ip_address()
        return trio.run(run_child, self, job)

    def status(self) -> tuple[float, EngineStatus]:
        """Return when the engine process sent its next message, by this node's clock, and the message.

        Blocks until there is one, which may be never.
        """
        return self.statuses.get()

    def leave(self) -> None:
        """Tell the engine process to compute what it has, and exit; ``run`` returns then."""
        if self.child is not None and self.token is not None:
            with suppress(trio.BrokenResourceError, trio.ClosedResourceError, trio.RunFinishedError):
                trio.from_thread.run(self.child.channel.send, Leave(), trio_token=self.token)


async def run_child(actor: EngineActor, job: EngineJob) -> tuple[str, str]:
    """Run the engine process of an actor, as ``run``. Cancellation: it is killed unless it exits in time."""
    actor.token, failure = trio.lowlevel.current_trio_token(), ""
    async with open_child(MODULE, job, EngineStatus, environment=actor.environment) as actor.child:
        while (status := await actor.child.status()) is not None:
            if isinstance(status, LoadFailed):
                failure = status.message
            else:
                actor.statuses.put((time.monotonic(), status))
        return await actor.child.wait(), failure
