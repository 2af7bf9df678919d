"""The server, whose process that talks to Ray is ``quick_scaling_process``."""

from trio_pool_serve.cli import main
from trio_pool_serve.engine.places import ray_places

if __name__ == "__main__":  # worker processes import what started the server
    ray_places.MODULE = "tests.ray.quick_scaling_process"
    main()
