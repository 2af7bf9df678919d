"""Ray's own test cluster, in a process of its own: nodes come and go by lines on its standard input.

``add CPUS`` adds a node and answers with its id, ``kill ID`` kills a node without a word to it, an empty line ends it.
The argument is the port of the head, 0 for any.
"""

import os
import sys

from ray.cluster_utils import Cluster

STORE_BYTES = 80 * 2**20


def say(*words: str) -> None:
    sys.stdout.write(" ".join(words) + "\n")
    sys.stdout.flush()


def main() -> None:
    os.environ["CLUSTER_OF_TEST"] = str(os.getpid())  # of all processes of its nodes
    head = {"num_cpus": 0, "include_dashboard": False, "object_store_memory": STORE_BYTES}
    if port := int(sys.argv[1]):
        head["gcs_server_port"] = port
    cluster = Cluster(initialize_head=True, head_node_args=head)
    nodes = {}
    say("at", cluster.address)
    for line in sys.stdin:
        match line.split():
            case ["add", cpus]:
                node = cluster.add_node(num_cpus=int(cpus), object_store_memory=STORE_BYTES)
                nodes[node.node_id] = node
                say("added", node.node_id)
            case ["kill", node_id]:
                cluster.remove_node(nodes.pop(node_id), allow_graceful=False)
                say("killed", node_id)
            case []:
                break
    cluster.shutdown()


if __name__ == "__main__":
    main()
