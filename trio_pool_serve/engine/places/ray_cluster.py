"""The connection to a Ray cluster, for a few control calls, and the actor that runs an engine process on a node.

Rows never travel by Ray. Ray is imported only where it is used, in a thread: the import takes seconds. ``ray.init``
replaces the handler of SIGTERM if it is called in the main thread, and holds the interpreter lock for about a second.

The threads are Trio's, not ``Offload``'s: the process does nothing else, so there is no event loop to keep fast
and no computing thread to give way to. Calls that end something use the default limiter, which has 40 tokens: a call
that Ray does not answer is abandoned and keeps its token, which must not be one of the tokens for placing replicas.
"""

import logging
import math
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from queue import SimpleQueue
from typing import Any

import trio
from attrs import define, field

from trio_pool_serve.config import ProcessesConfig, decode_config
from trio_pool_serve.engine.places.supervisor import MODULE, EngineJob, EngineStatus, Leave, Loaded
from trio_pool_serve.errors import EngineProcessDiedError, ModelLoadError, require
from trio_pool_serve.processes.child_process import ChildProcess, LoadFailed, open_child
from trio_pool_serve.processes.large_imports import LazyModule

logger = logging.getLogger(__name__)

ray: Any = LazyModule("ray")

REACH_TIMEOUT_S = 5.0

CONNECT_TIMEOUT_S = 60.0
"""``ray.init`` waits for longer for a cluster that does not answer."""

CLOSE_TIMEOUT_S = 5.0

CONTROL_CALLS = 4
"""Threads for calls to Ray, except calls that end something; each is a message to the cluster's head."""


class NodeLostError(EngineProcessDiedError):
    """The node of an actor no longer responds."""


def error_of(error: BaseException) -> EngineProcessDiedError:
    """Convert an exception of Ray's."""
    reason = " ".join(str(error).split())[:500]
    if isinstance(error, ray.exceptions.ActorUnavailableError | ray.exceptions.NodeDiedError):
        return NodeLostError(f"The node of an engine process does not respond: {reason}")
    return EngineProcessDiedError(f"Ray failed: {reason}")


@define(eq=False)
class RayCluster:
    """A cluster that this process is connected to, with the settings of all replicas."""

    config: ProcessesConfig
    limiter: trio.CapacityLimiter = field(factory=lambda: trio.CapacityLimiter(CONTROL_CALLS))

    async def in_thread(self, call: Callable[[], Any]) -> Any:
        """Return the result of a short Ray call. Raises ``PoolServeError``. Cancellation: after the call."""
        try:
            return await trio.to_thread.run_sync(call, limiter=self.limiter)
        except (ray.exceptions.RayError, OSError) as error:
            raise error_of(error) from error

    async def call(self, method: Any, *arguments: object) -> Any:
        """Call a method of an actor, and return its result.

        Raises ``PoolServeError``, as ``error_of``. Cancellation: at once; the call goes on until the actor ends.
        """
        done, token = trio.Event(), trio.lowlevel.current_trio_token()

        def wake(_: object) -> None:  # on a thread of Ray's
            with suppress(trio.RunFinishedError):
                token.run_sync_soon(done.set)

        future = (await self.in_thread(partial(method.remote, *arguments))).future()
        future.add_done_callback(wake)
        await done.wait()
        error = future.exception()
        if error is not None:
            raise error_of(error) from error
        return future.result()

    async def reserve(self, avoided: set[str]) -> Any:
        """Return a placement group for a replica, which avoids some nodes and waits for its resources.

        Raises ``PoolServeError``. Cancellation: after the call.
        """
        selectors = [{"ray.io/node-id": f"!in({','.join(sorted(avoided))})"}] if avoided else None
        return await self.in_thread(
            lambda: ray.util.placement_group(
                [resources_of(self.config)], strategy="SPREAD", bundle_label_selector=selectors
            )
        )

    async def start(self, group: Any) -> Any:
        """Return a new actor in a placement group. Raises ``PoolServeError``. Cancellation: after the call."""
        cpus = int(resources_of(self.config)["CPU"])
        actor = ray.remote(EngineActor).options(
            num_cpus=cpus,
            num_gpus=self.config.gpus_per_replica,
            max_restarts=0,
            max_concurrency=THREADS,
            scheduling_strategy=ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(group, 0),
        )
        return await self.in_thread(partial(actor.remote, cpus))

    async def kill(self, actor: Any) -> None:
        """End an actor. Cancellation: not before, but within ``CLOSE_TIMEOUT_S``."""
        await self._end(partial(ray.kill, actor))

    async def give_back(self, group: Any) -> None:
        """Remove a placement group. Cancellation: not before, but within ``CLOSE_TIMEOUT_S``."""
        await self._end(partial(ray.util.remove_placement_group, group))

    async def _end(self, call: Callable[[], object]) -> None:
        with trio.CancelScope(shield=True), trio.move_on_after(CLOSE_TIMEOUT_S):
            try:
                await trio.to_thread.run_sync(call, abandon_on_cancel=True)
            except Exception as error:
                logger.warning(
                    "Ray did not release an actor or a placement group, which stays until this process ends: %s", error
                )


def resources_of(config: ProcessesConfig) -> dict[str, float]:
    """Return the resources of a replica, by Ray's names: a CPU for each thread (``OMP_NUM_THREADS``, default one)."""
    threads = os.environ.get("OMP_NUM_THREADS", "")
    gpus = {"GPU": config.gpus_per_replica} if config.gpus_per_replica else {}
    return {"CPU": max(1, int(threads)) if threads.isdecimal() else 1, **gpus}


@asynccontextmanager
async def open_cluster(config: ProcessesConfig) -> AsyncIterator[RayCluster]:
    """Connect to the cluster of ``RAY_ADDRESS``, by default to this machine's, for the duration of the block.

    Raises ``ModelLoadError`` if it cannot be reached. Cancellation: at once while connecting; the connection is closed
    within ``CLOSE_TIMEOUT_S``, and Ray ends the actors of a process that has ended.
    """
    await _require_reachable(os.environ.get("RAY_ADDRESS", ""))
    with trio.move_on_after(CONNECT_TIMEOUT_S) as limit:
        try:
            await trio.to_thread.run_sync(
                lambda: ray.init(address="auto", log_to_driver=False, logging_level=logging.ERROR),
                abandon_on_cancel=True,
            )
        except Exception as error:
            raise ModelLoadError(f"--engine ray: {error}") from error
        # Ray's core has taken SIGTERM: it prints a stack trace before it calls the handler that was there.
        signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))
    require(
        not limit.cancelled_caught,
        f"--engine ray: the cluster did not respond within {CONNECT_TIMEOUT_S:g} s. Check RAY_ADDRESS.",
    )
    try:
        yield RayCluster(config)
    finally:
        with trio.CancelScope(shield=True), trio.move_on_after(CLOSE_TIMEOUT_S):
            await trio.to_thread.run_sync(ray.shutdown, abandon_on_cancel=True)


async def _require_reachable(address: str) -> None:
    """Raise ``ModelLoadError`` at once if ``ray.init`` would try for minutes, or use Ray's client."""
    require(
        "://" not in address,
        f"RAY_ADDRESS={address}: Ray's client cannot place engines. Set it to HOST:PORT of the head node.",
    )
    host, _, port = address.rpartition(":")
    if not port.isdecimal():
        return
    try:
        with trio.fail_after(REACH_TIMEOUT_S):
            stream = await trio.open_tcp_stream(host.strip("[]"), int(port))
        await trio.aclose_forcefully(stream)
    except trio.TooSlowError as error:
        raise ModelLoadError(f"RAY_ADDRESS={address} does not respond.") from error
    except OSError as error:
        raise ModelLoadError(f"RAY_ADDRESS={address} cannot be reached: {error}") from error


THREADS = 5
"""``run`` takes one thread for the actor's lifetime; the others are for concurrent calls."""


class EngineActor:
    """The Ray actor of a place: it runs the engine process as its child on the node that Ray has chosen.

    It has several threads and no coroutine, since Ray would run coroutines on one thread by asyncio. The engine process
    computes with ``threads`` threads, and exits when its channel closes: it does not outlive the actor, however that
    ends.
    """

    def __init__(self, threads: int) -> None:
        # As many as CPUs are reserved, whatever the node has.
        self.environment = {"OMP_NUM_THREADS": str(threads)}
        self.statuses: SimpleQueue[tuple[float, EngineStatus]] = SimpleQueue()
        self.child: ChildProcess[EngineStatus] | None = None
        self.token: trio.lowlevel.TrioToken | None = None

    def node(self) -> str:
        """Return the id of the node."""
        return str(ray.get_runtime_context().get_node_id())

    def run(self, job: EngineJob) -> tuple[str, str]:
        """Run an engine process; return how it ended, and why its model could not be loaded, if so.

        Blocks until it ends.
        """
        job.address = ray.util.get_node_ip_address()
        return trio.run(run_child, self, job)

    def status(self) -> tuple[float, EngineStatus]:
        """Return when the engine process sent its next message, by this node's clock, and the message.

        Blocks until there is one, possibly forever.
        """
        return self.statuses.get()

    def leave(self) -> None:
        """Tell the engine process to drain and exit; then ``run`` returns."""
        if self.child is not None and self.token is not None:
            with suppress(trio.BrokenResourceError, trio.ClosedResourceError, trio.RunFinishedError):
                trio.from_thread.run(self.child.channel.send, Leave(), trio_token=self.token)


async def run_child(actor: EngineActor, job: EngineJob) -> tuple[str, str]:
    """Run the engine process of an actor, like ``run``. Cancellation: it is killed unless it exits in time."""
    actor.token, failure, silence_s = trio.lowlevel.current_trio_token(), "", math.inf
    async with open_child(MODULE, job, EngineStatus, environment=actor.environment) as actor.child:
        while (status := await actor.child.status(silence_s)) is not None:
            if isinstance(status, LoadFailed):
                failure = status.message
            else:
                actor.statuses.put((time.monotonic(), status))
                if isinstance(status, Loaded):
                    silence_s = decode_config(job.config).scheduling.silence_timeout_s
        return actor.child.end, failure
