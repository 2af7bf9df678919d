"""What calls to an actor raise, as they are made from Trio: one line of JSON for each kind, for the test to look at.

Its argument is the address of a cluster.
"""

import json
import os
import signal
import sys
from typing import Any

import trio

from trio_pool_serve.config import ProcessesConfig
from trio_pool_serve.engine.places.ray_cluster import RayCluster, open_cluster
from trio_pool_serve.errors import PoolServeError


async def main(address: str) -> None:
    os.environ["RAY_ADDRESS"] = address
    before = signal.getsignal(signal.SIGTERM)
    async with open_cluster(ProcessesConfig()) as cluster:
        say("handler kept", signal.getsignal(signal.SIGTERM) is before)
        group = await cluster.reserve(set())
        actor = await cluster.start(group)
        say("node", await cluster.call(actor.node))
        say("failure of a method", await outcome_of(cluster, actor.run, None))
        await cluster.kill(actor)
        say("after its end", await failure_of(cluster, actor.node))
        actor = await cluster.start(group)
        await say_cancelled(cluster, actor)
        await cluster.give_back(group)
        say("after its group", await failure_of(cluster, actor.node))
        await cluster.kill(actor)


async def say_cancelled(cluster: RayCluster, actor: Any) -> None:
    with trio.move_on_after(0.5) as limit:
        await cluster.call(actor.status)  # which blocks until the engine process says something: there is none
    say("cancelled at once", limit.cancelled_caught)


async def outcome_of(cluster: RayCluster, method: object, *arguments: object) -> str:
    try:
        await cluster.call(method, *arguments)
    except PoolServeError as error:
        return type(error).__name__
    return "returned"


async def failure_of(cluster: RayCluster, method: object) -> str:
    """What a call to an actor raises once its process has ended, which takes a moment."""
    with trio.fail_after(60):
        while (outcome := await outcome_of(cluster, method)) == "returned":
            pass
    return outcome


def say(what: str, how: object) -> None:
    sys.stdout.write(json.dumps([what, how]) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    trio.run(main, sys.argv[1])
