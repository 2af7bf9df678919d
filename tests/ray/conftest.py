"""A Ray cluster of two nodes on this machine."""

import os
import signal
from collections.abc import Iterator

import pytest

from tests.server.server_process import ROOT

OBJECT_STORE_BYTES = 100 * 2**20


@pytest.fixture(scope="session")
def cluster_address() -> Iterator[str]:
    """The address of a cluster that this process is connected to. ``ray.init`` replaces the handler of SIGTERM."""
    import ray
    from ray.cluster_utils import Cluster

    handler = signal.getsignal(signal.SIGTERM)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]))
        node = {"num_cpus": 2, "object_store_memory": OBJECT_STORE_BYTES, "include_dashboard": False}
        cluster = Cluster(initialize_head=True, head_node_args=node)
        try:
            cluster.add_node(num_cpus=2, object_store_memory=OBJECT_STORE_BYTES)
            ray.init(address=cluster.address, log_to_driver=False)
            try:
                yield cluster.address
            finally:
                ray.shutdown()
        finally:
            cluster.shutdown()
            signal.signal(signal.SIGTERM, handler)
