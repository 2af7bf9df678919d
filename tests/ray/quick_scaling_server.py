"""The server, whose process that talks to Ray is ``quick_scaling_process``."""

from trio_pool_serve.cli import main
from trio_pool_serve.engine.places.ray import ray_placement

if __name__ == "__main__":  # worker processes import what started the server
    ray_placement.MODULE = "tests.ray.quick_scaling_process"
    main()
