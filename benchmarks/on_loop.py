"""Our server with offloading off: ``python -m benchmarks.on_loop --port N``."""

from argparse import ArgumentParser

import trio

from benchmarks.model import MODEL_NAME, MODEL_PATH
from trio_pool_serve.config import Config, ModelConfig, NetworkConfig
from trio_pool_serve.launcher import serve
from trio_pool_serve.offload import Offload
from trio_pool_serve.service import Service


def main() -> None:
    """Serve until SIGTERM, with everything that would go to a thread on the event loop instead."""
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    asked = parser.parse_args()
    config = Config(
        models=(MODEL_PATH,),
        loading=ModelConfig(served_model_name=MODEL_NAME),
        network=NetworkConfig(port=asked.port),
    )
    trio.run(serve, config, Service(config, offload=Offload(in_threads=False)))


if __name__ == "__main__":
    main()
