"""The process that talks to Ray, which adds a replica for a queue of 0.05 s and drains it after 5 s without need."""

from trio_pool_serve.engine.places import queue_scaling
from trio_pool_serve.engine.places.ray_places import RayJob
from trio_pool_serve.processes.child_process import run_as_child
from trio_pool_serve.server.ray_process import main

if __name__ == "__main__":
    queue_scaling.UP_QUEUE_SHARE, queue_scaling.MAX_QUEUES_IDLE = 0.01, 1
    queue_scaling.NEXT_TO_NO_QUEUE = 2.0  # times 0.05 s: the one client that stays is often just being answered
    run_as_child(main, RayJob)
