"""A Ray cluster of two nodes on this machine, and a process that is connected to it."""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import ParamSpec, TypeVar

import pytest
from attrs import frozen

from tests.ray.cluster_process import CLUSTER_ENVIRONMENT
from tests.server.server_process import ROOT

OBJECT_STORE_BYTES = 100 * 2**20

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


@frozen
class Driver:
    """A process of its own: Ray replaces the handler of SIGTERM, and takes its process along when it dies."""

    executor: ProcessPoolExecutor
    address: str
    """Of the cluster."""

    def run(self, function: Callable[Arguments, Result], *args: Arguments.args, **options: Arguments.kwargs) -> Result:
        """Call a function of a module there, and return what it returns."""
        return self.executor.submit(function, *args, **options).result()


def start_cluster() -> str:
    """Connect this process to a new cluster, which ends with it."""
    import ray
    from ray.cluster_utils import Cluster

    os.environ.update(CLUSTER_ENVIRONMENT)
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    node = {"num_cpus": 2, "object_store_memory": OBJECT_STORE_BYTES, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=node, shutdown_at_exit=True)
    cluster.add_node(num_cpus=2, object_store_memory=OBJECT_STORE_BYTES)
    ray.init(address=cluster.address, log_to_driver=False)
    return cluster.address


@pytest.fixture(scope="session")
def driver() -> Iterator[Driver]:
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as executor:
        yield Driver(executor, executor.submit(start_cluster).result())
