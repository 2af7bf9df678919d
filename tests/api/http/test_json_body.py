"""The first bodies of a server are decoded in several threads at once."""

import subprocess
import sys

PROGRAM = """
import json, sys, threading
from trio_pool_serve.api.dialects import DIALECTS
from trio_pool_serve.api.http.json_body import decode_json

sys.setswitchinterval(1e-6)
bodies = [(json.dumps(each.example).encode(), each.wire) for dialect in DIALECTS for each in dialect.endpoints]
barrier = threading.Barrier(4)

def decode():
    for body, wire in bodies:
        barrier.wait()
        decode_json(body, wire)

threads = [threading.Thread(target=decode) for _ in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print("decoded", len(bodies))
"""


def test_threads_that_decode_the_first_bodies_of_all_routes_do_not_crash_the_server():
    """msgspec works out a class when it is first decoded to; in two threads at once that ends the process."""
    ended = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert "Traceback" not in ended.stderr  # of a thread, which does not end the process
    assert ended.stdout.startswith("decoded ")
